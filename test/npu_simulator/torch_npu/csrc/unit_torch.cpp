// The other translation unit; unit_device.cpp says why there are two.
#include "autocast.cpp"
#include "bindings.cpp"
#include "convolution.cpp"
#include "hccl.cpp"
