"""The configuration: one frozen `TrainConfig` of typed sections, and `resolve`, which derives every number from it.

Precedence: field default < recipe (recipes.py) < command line (cli.py). The text below each field is its `--help`.
The sections are flat on the command line: `DataConfig.batch_size` is `--batch_size`.
"""

from dataclasses import asdict, dataclass, field
from typing import Literal

from mmcls.utils.errors import RequestError

Arch = Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
LR_REFERENCE_BATCH = 256
"""Images of global batch that a recipe's learning rate belongs to (Goyal et al. 2017, section 2.1)."""


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    arch: Arch = "resnet50"
    """The member of the ResNet family. Also -a."""
    num_classes: int | None = None
    """Outputs of the network; taken from the data unless given."""
    stem: Literal["auto", "imagenet", "cifar"] = "auto"
    """First layers: 7x7/2 and max-pool (imagenet) or 3x3/1 (cifar); auto takes cifar up to 64 pixels."""
    width_multiplier: float = 1.0
    """Scales the channels of every layer, by a multiple of 0.125; 0.25 is a cheap network for tests."""
    zero_init_last_norm: bool = False
    """Start each residual branch at zero (Goyal et al. 2017, section 5.1)."""
    freeze: tuple[str, ...] = ()
    """Parts of the network that keep their weights and norm statistics, with commas: conv1,bn1,layer1."""
    fine_tuning: bool = False
    """Train a new last layer on the weights of --pretrained and freeze all the rest."""


@dataclass(frozen=True)
class DataConfig:
    """The images and their order."""

    data_path: str = "digits"
    """The data set: a folder with train/<class>/ and val/<class>/, CIFAR-10 or CIFAR-100 (a folder or the
    .tar.gz), `digits` (1,797 handwritten digits that come with scikit-learn) or `synthetic`. Also --data."""
    batch_size: int = 16
    """Images per rank and micro-batch; the global batch is this times ranks times accumulation. Also -b."""
    image_size: int | None = None
    """Height and width in pixels; taken from the data unless given."""
    workers: int | None = None
    """Loader processes per rank for image folders, 8 unless given, and never more than cores // ranks. Also -j."""
    synthetic_images: int | None = None
    """Training images of --data_path=synthetic (a quarter of it for validation); default: 100 global batches."""
    allow_empty_classes: bool = False
    """Accept class folders of train/ that hold no image."""
    no_augment_epochs: int = 0
    """Last epochs that see the images as validation does, without crops, flips, mixup and cutmix."""
    mixup: float = 0.0
    """Alpha of mixup (Zhang et al. 2018), 0 for none; with --cutmix one of the two is drawn for each batch."""
    cutmix: float = 0.0
    """Alpha of cutmix (Yun et al. 2019), 0 for none."""
    exif_rotation: bool = False
    """Turn pictures as their EXIF orientation says; torchvision's folders do not."""
    on_bad_image: Literal["stop", "skip"] = "stop"
    """Pictures that cannot be decoded: stop with the path and the reason, or train on others in their place, validate
    without them, and list them in the run folder's bad_files.txt."""
    resident: Literal["auto", "device", "host", "off"] = "auto"
    """Where small images lie that are decoded once and then cropped and mirrored as whole batches: on the device or
    in main memory; auto: on the device if they fit in --resident_bytes. off reads small pictures of a folder anew in
    each epoch. CIFAR, digits and synthetic images are always decoded once."""
    resident_bytes: int = 2**30
    """Bytes that images may take on the device with --resident=auto, for training and for validation each."""
    cutout: int = 0
    """Side in pixels of the square that is blanked in each training image (DeVries & Taylor 2017); 0 for none."""
    prefetch: int | None = None
    """Finished batches that a background thread keeps ready on the device, 0 for no thread; default: 2 for files,
    none for images that lie on the device."""
    data_timeout: float = 300.0
    """Seconds without a batch that end the run; with --workers=0 --prefetch=0 nobody watches."""


@dataclass(frozen=True)
class OptimConfig:
    """Loss and optimizer."""

    optimizer: Literal["sgd", "lars"] = "sgd"
    """sgd, or lars for global batches above 8,192 images (You et al. 2017)."""
    lr: float | None = None
    """Peak learning rate as given; unless given: the recipe's per 256 images, times global batch / 256.
    Also --learning-rate."""
    lr_per_256: float = 0.1
    """The recipe's learning rate for 256 images of global batch; used where --lr is not given."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 1e-4
    """Weight decay of convolution and linear weights; norms and biases have none. Also --wd."""
    nesterov: bool = False
    """Nesterov momentum."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over all classes (Szegedy et al. 2016, section 7)."""
    clip_grad_norm: float | None = None
    """Largest norm of all gradients together; larger ones are scaled down to it (Pascanu et al. 2013)."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights with this decay, validated and saved beside them."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the run, a pure function of the step."""

    epochs: int = 90
    """Epochs to train."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, whatever the epochs."""
    schedule: Literal["step", "cosine", "linear", "polynomial"] = "cosine"
    """Shape of the decay after the warm-up."""
    warmup: float | None = None
    """Epochs of linear warm-up from lr / warm-up steps to lr; unless given: the recipe's. Also --warmup-epochs."""
    recipe_warmup: float = 0.0
    """The recipe's epochs of warm-up; used where --warmup is not given."""
    recipe_warmup_above_lr: float = 0.0
    """The recipe's warm-up is left out where the peak learning rate is not above this."""
    milestones: tuple[int, ...] = (30, 60, 80)
    """Epochs at which the step schedule multiplies the learning rate by --gamma."""
    gamma: float = 0.1
    """Factor of the step schedule."""
    power: float = 2.0
    """Exponent of the polynomial schedule."""
    accumulation_steps: int = 1
    """Micro-batches per optimizer step."""


@dataclass(frozen=True)
class PrecisionConfig:
    """Mixed precision."""

    opt_level: Literal["auto", "O0", "O1", "O2", "O3"] = "O0"
    """O0: float32. O1: autocast. O2: short weights with float32 norms and master weights. O3: all short, a speed
    reference. auto: O1 where the device computes the short type faster than float32, else O0.
    Also --amp (O2) and --precision_mode (allow_mix_precision is O2, must_keep_origin_dtype O0)."""
    half_type: Literal["float16", "bfloat16"] | None = None
    """Short type of O1 to O3; default: bfloat16 on cpu, float16 on npu and cuda."""
    loss_scale: str | None = None
    """`dynamic`, or a number of at least 1; default: dynamic where float16 is used, but 1 at O3. Also
    --static_loss_scale=N and --dynamic_loss_scale."""
    init_loss_scale: float = 2.0**16
    """First dynamic loss scale."""
    loss_scale_factor: float = 2.0
    """The dynamic loss scale is multiplied by it after --loss_scale_growth_interval good updates, divided by it after
    an overflow."""
    loss_scale_growth_interval: int = 2000
    """Updates without overflow before the dynamic loss scale grows."""
    min_loss_scale: float = 1.0
    """The dynamic loss scale never falls below it."""
    keep_batchnorm_fp32: bool | None = None
    """Norms in float32; default: yes at O2, no at O3."""
    master_weights: bool | None = None
    """A float32 copy of short weights, which the optimizer changes; default: yes at O2, no at O3."""
    amp_engine: Literal["auto", "apex", "torch"] = "auto"
    """Who does mixed precision; auto takes Apex where it is installed with amp and the device is no CPU."""
    channels_last: bool | None = None
    """Memory format of images and weights; default: on for cpu and cuda, off for npu."""


@dataclass(frozen=True)
class DistributedConfig:
    """Devices and ranks."""

    device: Literal["auto", "npu", "cuda", "cpu"] = "auto"
    """What to run on; auto takes npu, then cuda, then cpu."""
    simulate_npu: bool = False
    """Rehearse on the simulated NPU of test/npu_simulator: the code of an NPU run, on the CPU."""
    gpu: str | None = None
    """Id of the card (0 is card 0), or ids with commas for several ranks. Also --device-list."""
    nproc_per_node: int | None = None
    """Ranks on this machine; default: one a card of --gpu, else one."""
    multiprocessing_distributed: bool = False
    """One rank per card of this machine."""
    world_size: int = 1
    """Number of machines."""
    rank: int = 0
    """Number of this machine, from 0."""
    dist_url: str | None = None
    """Where the machines meet: tcp://HOST:PORT. --addr HOST gives the host alone."""
    dist_backend: Literal["hccl", "nccl", "gloo"] | None = None
    """Collective library; must fit the device, which chooses it unless given."""
    dist_timeout: float = 1800.0
    """Seconds that a collective may wait for the slowest rank."""


@dataclass(frozen=True)
class RunConfig:
    """What a run starts from, writes and prints."""

    recipe: Literal["full", "performance"] = "full"
    """full: the accuracy run, float32. performance: the throughput run, mixed precision and few epochs."""
    seed: int = 0
    """Seed of weights, order and augmentation."""
    deterministic: bool = False
    """Only kernels that give the same bits each time, on this machine and these versions; slower."""
    output_dir: str | None = None
    """Folder of the run folders; default: test/output in the repository."""
    resume: str | None = None
    """Continue the run of this checkpoint exactly."""
    pretrained: str | None = None
    """Take the weights of this file, and nothing else."""
    evaluate: bool = False
    """Validate --resume or --pretrained and stop. Also -e."""
    print_freq: int = 10
    """Steps between two log lines. Also -p."""
    throughput_warmup_steps: int = 5
    """First steps of a run that images/s leaves out."""
    check_data: bool = False
    """Decode every picture of --data_path, print the paths that cannot be read and why, and stop."""
    print_config: bool = False
    """Print the resolved configuration and stop."""


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run is made of."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    run: RunConfig = field(default_factory=RunConfig)


def to_plain(config: object) -> dict:
    """A dataclass as nested dicts of numbers, strings and lists, for files."""
    plain = asdict(config)
    for section in (plain, *(value for value in plain.values() if isinstance(value, dict))):
        section.update({name: list(value) for name, value in section.items() if isinstance(value, tuple)})
    return plain


@dataclass(frozen=True)
class RunPlan:
    """Every number that follows from the configuration, the number of ranks and the data."""

    world_size: int
    micro_batch_size: int
    accumulation_steps: int
    rank_batch_size: int
    global_batch_size: int
    num_train_images: int
    num_val_images: int
    left_out_images: int
    steps_per_epoch: int
    epochs: int
    total_steps: int
    warmup_epochs: float
    no_augment_epochs: int
    peak_lr: float

    @property
    def batch_line(self) -> str:
        return (
            f"global batch {self.global_batch_size} = {self.world_size} ranks x {self.micro_batch_size} "
            f"x {self.accumulation_steps} accumulation"
        )


def resolve(config: TrainConfig, world_size: int, num_train_images: int, num_val_images: int) -> RunPlan:
    """Derives the numbers of a run; the same on every rank, so all ranks take the same number of steps.

    Raises:
        RequestError: the training images do not fill one global batch.
    """
    accumulation = config.schedule.accumulation_steps
    rank_batch = config.data.batch_size * accumulation
    global_batch = rank_batch * world_size
    steps_per_epoch = num_train_images // global_batch
    if steps_per_epoch == 0 and not config.run.evaluate:
        raise RequestError(
            f"--batch_size={config.data.batch_size}",
            f"{num_train_images} training images do not fill one global batch of {global_batch}",
            "take a smaller batch, fewer ranks or more images",
        )
    total_steps = steps_per_epoch * config.schedule.epochs
    if config.schedule.max_steps is not None:
        total_steps = min(total_steps, config.schedule.max_steps)
    optim, schedule = config.optim, config.schedule
    peak_lr = optim.lr_per_256 * global_batch / LR_REFERENCE_BATCH if optim.lr is None else optim.lr
    recipe_warmup = schedule.recipe_warmup if peak_lr > schedule.recipe_warmup_above_lr else 0.0
    return RunPlan(
        world_size=world_size,
        micro_batch_size=config.data.batch_size,
        accumulation_steps=accumulation,
        rank_batch_size=rank_batch,
        global_batch_size=global_batch,
        num_train_images=num_train_images,
        num_val_images=num_val_images,
        left_out_images=num_train_images - steps_per_epoch * global_batch,
        steps_per_epoch=steps_per_epoch,
        epochs=config.schedule.epochs,
        total_steps=total_steps,
        warmup_epochs=recipe_warmup if schedule.warmup is None else schedule.warmup,
        no_augment_epochs=config.data.no_augment_epochs,
        peak_lr=peak_lr,
    )
