"""Environment variables: the machine that is played, its mask, and the failures that it can be told to have.

Each check needs a process that has not loaded the simulator. A fork of this one
has PyTorch already, which saves its seconds of start-up.
"""

import os
import traceback

import pytest
import torch  # noqa: F401

USE_CARD = "import torch, torch_npu; torch.npu.set_device(0); print(torch.ones(3, device='npu').sum().item())"


@pytest.fixture
def child(tmp_path):
    """Runs code in a fork with environment variables; gives its exit status and what it wrote."""

    def run(code, **environment):
        output = tmp_path / "output"
        process = os.fork()
        if not process:
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.environ.update(environment)
            try:
                with open(1, "w", closefd=False) as stdout:
                    exec(code, {"print": lambda *values: print(*values, file=stdout, flush=True)})
            except BaseException:
                os.write(2, traceback.format_exc().encode())
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        return os.waitstatus_to_exitcode(status), output.read_text()

    return run


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_it_loads_whatever_the_autoload_setting(child, autoload):
    code = "import torch_npu, os; print(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])"
    assert child(code, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload) == (0, autoload + "\n")


def test_the_machine(child):
    code = """
import torch, torch_npu
properties = torch.npu.get_device_properties()
print(torch.npu.device_count(), properties.name, properties.total_memory >> 20)
"""
    settings = dict(NPU_SIMULATOR_CARDS="2", NPU_SIMULATOR_SOC="Ascend910A", NPU_SIMULATOR_MEMORY_MB="100")
    assert child(code, **settings) == (0, "2 Ascend910A 100\n")
    assert child(code) == (0, "8 Ascend910B3 65536\n")


@pytest.mark.parametrize(
    "mask,count", [("0,1", 2), ("3", 1), ("1,0", 0), ("0,99", 1), ("a,b", 0), ("0, 1", 1), ("", 0), ("2,2", 0)]
)
def test_the_mask_of_visible_devices(child, mask, count):
    code = "import torch, torch_npu; print(torch.npu.device_count(), torch.npu.is_available())"
    assert child(code, ASCEND_RT_VISIBLE_DEVICES=mask) == (0, f"{count} {count > 0}\n")


def test_names_that_do_not_exist(child):
    assert "no such fault" in child(USE_CARD, NPU_SIMULATOR_FAULT="fire")[1]
    assert "is not played" in child(USE_CARD, NPU_SIMULATOR_SOC="Ascend310")[1]


def test_no_libhccl(child):
    status, text = child("import torch_npu", NPU_SIMULATOR_FAULT="no_libhccl")
    assert status == 1 and text.splitlines()[-1].startswith("ImportError: libhccl.so: cannot open shared object file")


def test_no_compiler(child, tmp_path):
    status, text = child("import torch_npu", CXX="no-such-compiler", NPU_SIMULATOR_CACHE=str(tmp_path / "empty"))
    assert status == 1 and "there is no C++ compiler `no-such-compiler`; install g++" in text


def test_busy_card(child):
    status, text = child(USE_CARD, NPU_SIMULATOR_FAULT="busy")
    assert status == 1 and "EJ0001: Failed to initialize the HCCP process" in text


def test_a_fault_that_happens_once(child, tmp_path):
    fault = f"busy:once={tmp_path / 'happened'}"
    assert [child(USE_CARD, NPU_SIMULATOR_FAULT=fault)[0] for _ in range(2)] == [1, 0]


def test_a_fault_of_another_rank(child):
    assert [child(USE_CARD, NPU_SIMULATOR_FAULT="busy:rank=1", RANK=rank)[0] for rank in "01"] == [0, 1]


@pytest.mark.parametrize(
    "limit", [{"NPU_SIMULATOR_FAULT": "out_of_memory:bytes=1000000"}, {"NPU_SIMULATOR_MEMORY_MB": "1"}]
)
def test_out_of_memory(child, limit):
    code = "import torch, torch_npu; x = torch.ones(1000, device='npu'); print('small'); x.repeat(1000)"
    status, text = child(code, **limit)
    assert status == 1 and text.startswith("small\n")
    assert "OutOfMemoryError: NPU out of memory. Tried to allocate" in text


def test_a_dead_card_shows_at_the_next_wait(child):
    code = """
import torch, torch_npu
x = torch.ones(3, device="npu")
for _ in range(10):
    x = x + 1
print("launched")
torch.npu.synchronize()
"""
    status, text = child(code, NPU_SIMULATOR_FAULT="dead_card:kernel=5")
    assert status == 1 and text.startswith("launched\n") and "error code:507046" in text
