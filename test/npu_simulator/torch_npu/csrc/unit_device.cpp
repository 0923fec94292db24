// PyTorch's headers take longer to compile than this code: two translation
// units, which two cores compile side by side, in place of one for each file.
#include "chip.cpp"
#include "device.cpp"
#include "fallback.cpp"
#include "faults.cpp"
#include "kernels.cpp"
#include "memory.cpp"
