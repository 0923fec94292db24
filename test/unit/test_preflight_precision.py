"""The level and the engine that a job is given before any rank is started; cards and Apex are pretended."""

import sys

import pytest

from image_classification import levels, placement, precision, preflight
from image_classification.config import DistributedConfig, PrecisionConfig, TrainConfig
from image_classification.data import DataLayout
from image_classification.preflight import prepare_job
from mmcls.utils.errors import RequestError

DIGITS = DataLayout("digits", None, "digits", 16, 10, True)
O1_ON_A_CARD = "O1: weights float32, norms float32, compute float16, loss scale dynamic"
WHOLE_AMP = "def initialize(): ...\nscale_loss = state_dict = load_state_dict = master_params = initialize\n"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Pretends one card of npu and one of cuda and a CPU with bfloat16 instructions; there is no Apex."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(placement, "device_count", lambda device_type: int(device_type != "cpu"))
    monkeypatch.setattr(placement, "check_npu_mask", lambda: None)
    monkeypatch.setattr(preflight, "has_fast_half", lambda device_type, half: True)
    monkeypatch.setattr(levels, "supports_bfloat16", lambda device_type: True)
    monkeypatch.setitem(sys.modules, "apex", None)
    precision.apex_problem.cache_clear()
    yield
    precision.apex_problem.cache_clear()


@pytest.fixture
def slow_cpu(monkeypatch):
    monkeypatch.setattr(preflight, "has_fast_half", lambda device_type, half: device_type != "cpu")


@pytest.fixture
def apex(tmp_path, monkeypatch):
    """Installs a package apex of the given files, which is really imported."""

    def install(files, version=None):
        for name, source in files.items():
            path = tmp_path / "site" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        if version:
            metadata = tmp_path / "site" / f"apex-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: apex\nVersion: {version}\n")
        monkeypatch.delitem(sys.modules, "apex", raising=False)
        monkeypatch.syspath_prepend(tmp_path / "site")

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        del sys.modules[name]


WEB_PACKAGE = {"apex/__init__.py": "raise ImportError('pyramid')"}
NO_AMP = {"apex/__init__.py": "__version__ = '0.1'", "apex/optimizers/__init__.py": ""}
WHOLE = {**NO_AMP, "apex/amp.py": WHOLE_AMP}


def job_of(device="cuda", layout=DIGITS, **options):
    config = TrainConfig(precision=PrecisionConfig(**options), distributed=DistributedConfig(device=device))
    return prepare_job(config, layout, started_at=0.0)


def lines_of(device="cuda", **options):
    """What is said about precision, less the common beginning."""
    notes = [note for note in job_of(device, **options).notes if note.startswith("precision ")]
    assert len(notes) == 1
    return notes[0].removeprefix("precision ")


def refused(device="cuda", **options):
    with pytest.raises(RequestError) as caught:
        job_of(device, **options)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize(
    ("device", "level", "options", "line"),
    [
        ("cpu", "O0", {}, "O0: weights float32, norms float32, compute float32, loss scale 1; by torch, memory format channels_last"),
        ("cuda", "O1", {}, f"{O1_ON_A_CARD}; by torch, memory format channels_last"),
        ("npu", "O1", {}, f"{O1_ON_A_CARD}; by torch, memory format contiguous_format"),
        ("npu", "O1", {"channels_last": True}, f"{O1_ON_A_CARD}; by torch, memory format channels_last"),
        ("cuda", "O1", {"channels_last": False}, f"{O1_ON_A_CARD}; by torch, memory format contiguous_format"),
        ("cuda", "O3", {}, "O3: weights float16, norms float16, compute float16, loss scale 1; by torch, memory format channels_last"),
    ],
)  # fmt: skip
def test_one_line_says_what_is_used(device, level, options, line):
    assert lines_of(device, opt_level=level, **options) == line


@pytest.mark.parametrize(("level", "said"), [("O0", False), ("O1", False), ("O2", False), ("O3", True)])
def test_o3_is_called_a_reference_for_speed_once(level, said):
    notes = [note for note in job_of(opt_level=level).notes if "reference for speed" in note]
    assert len(notes) == int(said)


def test_the_automatic_level_of_a_fast_device():
    for device in ("cpu", "npu", "cuda"):
        job = job_of(device, opt_level="auto")
        assert job.config.precision.opt_level == "O1"
        assert not [note for note in job.notes if "no bfloat16" in note]


def test_the_automatic_level_of_a_cpu_without_bfloat16(slow_cpu):
    job = job_of("cpu", opt_level="auto")
    assert job.config.precision.opt_level == "O0"
    assert len([note for note in job.notes if "no bfloat16 instructions, so auto is O0" in note]) == 1
    assert job_of("cuda", opt_level="auto").config.precision.opt_level == "O1"
    assert job_of("cpu", opt_level="auto", half_type="bfloat16").config.precision.opt_level == "O1"


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_level_that_is_slow_here_is_used_and_warned_of(slow_cpu, level):
    job = job_of("cpu", opt_level=level)
    assert job.config.precision.opt_level == level
    assert f"warning: this CPU is slower in bfloat16 than in float32, so {level} is slower than O0" in job.notes
    assert not [note for note in job_of("cuda", opt_level=level).notes if "slower" in note]


def test_a_job_that_was_completed_stays_as_it_is(apex):
    apex(WHOLE)
    for device, level, engine in (("cpu", "O2", "torch"), ("cuda", "O2", "apex"), ("cuda", "auto", "apex")):
        config = job_of(device, opt_level=level).config
        assert config.precision.amp_engine == engine
        assert prepare_job(config, DIGITS, 0.0).config == config


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        ({"opt_level": "O0", "half_type": "float16"}, "--half_type=float16"),
        ({"opt_level": "O1", "master_weights": True}, "--master_weights"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, "--keep_batchnorm_fp32"),
        ({"opt_level": "O3", "loss_scale": "dynamic"}, "--loss_scale=dynamic"),
        ({"opt_level": "O1", "loss_scale": "0.5"}, "--loss_scale=0.5"),
        ({"opt_level": "O1", "amp_engine": "apex"}, "--amp_engine=apex"),
    ],
)
def test_precision_is_decided_before_data_are_touched(monkeypatch, options, subject):
    """A data set may be an archive, and unpacking takes minutes."""
    opened = []

    def prepare(layout):
        opened.append(layout)
        return layout

    monkeypatch.setattr(preflight, "prepare_data", prepare)
    assert refused(**options).subject == subject
    assert not opened
    job_of(opt_level="O1")
    assert opened


def test_where_apex_is_whole_a_card_takes_it(apex):
    apex(WHOLE)
    assert precision.apex_problem() is None
    for device in ("cuda", "npu"):
        for level in ("O1", "O2", "O3"):
            job = job_of(device, opt_level=level)
            assert job.config.precision.amp_engine == "apex"
        assert "; by apex, memory format" in lines_of(device, opt_level="O2")


@pytest.mark.parametrize(
    ("device", "options", "engine"),
    [
        ("cuda", {"opt_level": "O0"}, "by torch, "),
        ("cuda", {"opt_level": "O2", "amp_engine": "torch"}, "by torch, "),
        ("cuda", {"opt_level": "O2", "half_type": "bfloat16"}, "by torch (Apex computes in float16), "),
        ("cpu", {"opt_level": "O2"}, "by torch (Apex needs a card), "),
        ("cpu", {"opt_level": "O2", "half_type": "float16"}, "by torch (Apex needs a card), "),
    ],
)
def test_where_apex_is_whole_torch_does_the_rest(apex, device, options, engine):
    apex(WHOLE)
    assert job_of(device, **options).config.precision.amp_engine == "torch"
    assert f"; {engine}" in lines_of(device, **options)


@pytest.mark.parametrize(
    ("files", "version", "problem"),
    [
        (WEB_PACKAGE, "0.9.10.dev0", "found a different package called apex (0.9.10.dev0); see README"),
        (WEB_PACKAGE, None, "found a different package called apex (unknown version); see README"),
        ({"apex/__init__.py": "1 / 0"}, "3.0", "found a different package called apex (3.0); see README"),
        ({"apex/__init__.py": ""}, "3.0", "found a different package called apex (3.0); see README"),
        ({"apex.py": ""}, None, "found a different package called apex (unknown version); see README"),
        (NO_AMP, "0.2", "apex 0.2 has no amp, which NVIDIA removed in May 2025; see README"),
    ],
    ids=["web package", "without metadata", "broken", "empty", "one file", "NVIDIA's without amp"],
)
def test_what_else_is_called_apex(apex, files, version, problem):
    apex(files, version)
    assert precision.apex_problem() == problem
    job = job_of(opt_level="O2")
    assert job.config.precision.amp_engine == "torch"
    assert f"; by torch ({problem}), memory format" in lines_of(opt_level="O2")
    error = refused(opt_level="O2", amp_engine="apex")
    assert str(error) == f"--amp_engine=apex: {problem}; take --amp_engine=torch"


def test_no_apex_needs_no_word_unless_it_was_asked_for():
    assert "; by torch, memory format" in lines_of(opt_level="O2")
    assert refused(opt_level="O2", amp_engine="apex").problem == "apex is not installed"


@pytest.mark.parametrize(
    ("device", "options", "problem"),
    [
        ("cpu", {"opt_level": "O2"}, "Apex needs a card"),
        ("cpu", {"opt_level": "O0"}, "Apex needs a card"),
        ("cuda", {"opt_level": "O2", "half_type": "bfloat16"}, "Apex computes in float16"),
    ],
)
def test_apex_where_it_cannot_serve(apex, device, options, problem):
    apex(WHOLE)
    assert refused(device, amp_engine="apex", **options).problem == problem


@pytest.mark.parametrize("options", [{"opt_level": "O0"}, {"opt_level": "O2", "amp_engine": "torch"}])
def test_apex_is_not_imported_where_it_is_not_wanted(apex, options):
    apex(WHOLE)
    job_of(**options)
    assert "apex" not in sys.modules
