"""Data sets of encoded pictures, decoded when they are asked for, whatever holds their bytes."""

from abc import abstractmethod

import numpy as np
from torch.utils.data import Dataset

from image_classification.data import augment
from image_classification.data.decode import DecodeError, ImageReadError, Picture
from image_classification.data.order import image_generator

REPLACEMENT_ATTEMPTS = 10


class PictureDataset(Dataset):
    """The pictures of train/ or val/. A subclass says where the bytes of picture i are.

    Item i is `([size, size, 3] uint8, label)`, the view that validation takes; `training_view` gives random ones.

    Args:
        split: train or val.
        labels: `[N]`, int32: places in `class_names`.
        image_size: height and width of the views in pixels.
        small_images: the pictures are small (CIFAR-like), so they are not cropped to a part of their area.
        mean, std: per channel, in units of the full range (0..1).
        exif_rotation: turn pictures as their EXIF orientation says.
        skip_bad: pictures that cannot be decoded end the run, or else `sample` goes on without them.
    """

    def __init__(
        self,
        split: str,
        class_names: tuple[str, ...],
        labels: np.ndarray,
        *,
        image_size: int,
        small_images: bool,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        exif_rotation: bool = False,
        skip_bad: bool = False,
    ):
        self.split, self.class_names, self.labels = split, class_names, labels
        self.image_size, self.small_images, self.exif_rotation = image_size, small_images, exif_rotation
        self.mean, self.std, self.skip_bad = mean, std, skip_bad

    @abstractmethod
    def name(self, index: int) -> str:
        """Where the picture is, for people: the path of its file."""

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """The bytes of the picture's file.

        Raises:
            DecodeError: they cannot be read.
        """

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """The view that validation takes, and the label.

        Raises:
            ImageReadError: the picture cannot be decoded; so do the other methods.
        """
        view = augment.small_view if self.small_images else augment.big_view
        try:
            return view(self._picture(index), self.image_size), int(self.labels[index])
        except DecodeError as error:
            raise self._read_error(index, error) from error

    def training_view(self, index: int, seed: int, epoch: int) -> tuple[np.ndarray, int]:
        """A randomly cropped and mirrored view, a pure function of (seed, epoch, index), and the label."""
        view = augment.small_training_view if self.small_images else augment.big_training_view
        rng = image_generator(seed, epoch, index)
        try:
            return view(self._picture(index), self.image_size, rng), int(self.labels[index])
        except DecodeError as error:
            raise self._read_error(index, error) from error

    def sample(
        self, index: int, seed: int, epoch: int | None
    ) -> tuple[tuple[np.ndarray, int] | None, list[ImageReadError]]:
        """What stands for a picture in a batch: its training view, or without an epoch the view of validation.

        With `skip_bad`, another picture stands for one of train/ that cannot be decoded, so that batches stay full.
        Which one is a pure function of (seed, epoch, index) and of which pictures can be decoded. One of val/ is left
        out: another one in its place would count twice.

        Returns:
            View and label, None for a picture that is left out; and what could not be decoded on the way.

        Raises:
            ImageReadError: a picture cannot be decoded and is not skipped, or ten others cannot be either.
        """
        others, errors = None, []
        while True:
            try:
                return self[index] if epoch is None else self.training_view(index, seed, epoch), errors
            except ImageReadError as error:
                errors.append(error)
                if not self.skip_bad or len(errors) > REPLACEMENT_ATTEMPTS:
                    raise errors[0] from error
                if self.split != "train":
                    return None, errors
                if others is None:
                    # The draws of a picture that has no view are free to choose others by.
                    rng = image_generator(seed, epoch or 0, index)
                    others = iter(rng.integers(len(self), size=REPLACEMENT_ATTEMPTS).tolist())
                index = next(others)

    def pixels(self, index: int) -> np.ndarray:
        """The whole picture, `[height, width, 3]`, uint8."""
        try:
            return self._picture(index).pixels()
        except DecodeError as error:
            raise self._read_error(index, error) from error

    def _picture(self, index: int) -> Picture:
        return Picture(self.encoded(index), self.exif_rotation)

    def _read_error(self, index: int, error: DecodeError) -> ImageReadError:
        return ImageReadError(self.name(index), self.class_names[self.labels[index]], self.split, str(error))
