"""The images: which data set a path holds, its images and labels, and batches of them on the device.

layouts    what --data_path names, checked before any rank is started
datasets   opens it: cifar (with archive), folder (with decode), arrays (digits, synthetic)
loader     batches for one rank, from sources (in memory or files), some ahead (prefetch); small files become
           resident; limits of the machine are checked before; order and augment are its pure functions
"""

from image_classification.data.arrays import ArrayDataset
from image_classification.data.datasets import Datasets, open_datasets
from image_classification.data.decode import ImageReadError
from image_classification.data.folder import FolderDataset, printable
from image_classification.data.layouts import DataLayout, absolute_path, detect_layout, prepare_data
from image_classification.data.limits import LoaderError, explain_loader_failure
from image_classification.data.loader import EvalLoader, TrainLoader, check_loaders

__all__ = [
    "ArrayDataset",
    "DataLayout",
    "Datasets",
    "EvalLoader",
    "FolderDataset",
    "ImageReadError",
    "LoaderError",
    "TrainLoader",
    "absolute_path",
    "check_loaders",
    "detect_layout",
    "explain_loader_failure",
    "open_datasets",
    "prepare_data",
    "printable",
]
