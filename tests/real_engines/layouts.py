"""Ask vLLM which layouts it starts: its configuration check, then its model classes, without weights and without a GPU.

    python -m tests.real_engines.layouts < questions.json > answers.json

vLLM believes to be on H100s: what a class refuses there can depend on kernels that the CPU does not have. It is told so
before it is imported, so this is a program of its own. Kernels have names but cannot be called; tensors are on PyTorch's
meta device, which has shapes but no memory; and of all processes only the first is there.
"""

import importlib.abc
import importlib.machinery
import json
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path
from unittest.mock import MagicMock

TEXT = {
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
"""Classes that also see, which need torchvision, and that of their language model."""
EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
FIRST = 8
"""Layers that are built of each model, and the last two: all kinds are among them."""


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes packages that are imported but not used."""

    def find_spec(self, name, path=None, target=None):
        is_wanted = name in EXTENSIONS or name.split(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_wanted else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__version__ = "0"
        module.__getattr__ = lambda name: MagicMock() if not name.startswith("__") else _missing(name)
        return module

    def exec_module(self, module):
        pass


def _missing(name):
    raise AttributeError(name)


def be_on_h100s():
    """Make vLLM find H100s; nothing of it may have been imported before."""
    sys.meta_path.insert(0, Absent())
    import torch
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    answers = {
        "get_device_capability": DeviceCapability(9, 0), "get_device_name": "NVIDIA H100", "is_fully_connected": True,
        "get_device_total_memory": 80 << 30, "device_count": 1024, "num_compute_units": 132, "support_deep_gemm": True,
        "get_cuda_runtime_major": 13, "check_if_supports_dtype": None, "is_pin_memory_available": False,
    }  # fmt: skip
    methods = {name: classmethod(lambda cls, *_, answer=answer, **__: answer) for name, answer in answers.items()}
    vllm.platforms._current_platform = type("Hopper", (CudaPlatformBase,), methods)()
    torch.cuda.Stream, torch.cuda.Event = (type(name, (), {"__init__": lambda *_, **__: None}) for name in "SE")
    torch.cuda.current_stream = lambda *_: torch.cuda.Stream()
    torch.cuda.get_device_properties = lambda *_: MagicMock(multi_processor_count=132)
    torch.cuda.current_device = lambda: 0
    _name_kernels()


def _name_kernels():
    """Make every operation exist: the ones that ask for support answer yes, and Triton's can be declared."""
    import torch._ops
    import vllm._custom_ops
    import vllm.triton_utils
    import vllm.utils.import_utils

    def operation(self, name):
        try:
            return found(self, name)
        except AttributeError:
            if name.startswith("__") or not self.name.startswith("_"):
                raise
            return MagicMock(return_value="support" in name)

    found, torch._ops._OpNamespace.__getattr__ = torch._ops._OpNamespace.__getattr__, operation
    vllm.triton_utils.triton.Config = lambda kwargs=None, num_warps=4, num_stages=2, **_: types.SimpleNamespace(
        kwargs=kwargs, num_warps=num_warps, num_stages=num_stages
    )
    vllm.utils.import_utils.has_deep_gemm = lambda: True


def be_alone():
    """Make groups of processes of which only this one exists, and build few layers."""
    import torch
    import torch.fx.experimental._config
    import vllm.model_executor.models.registry as registry
    import vllm.model_executor.models.utils as models
    from vllm.distributed import parallel_state

    made, grouped = torch.distributed.new_group, parallel_state.init_model_parallel_group
    torch.distributed.new_group = lambda ranks=None, timeout=None, backend=None, **more: made(
        ranks, timeout, backend="fake", **more
    )
    parallel_state._node_count = lambda group: 1
    parallel_state.init_model_parallel_group = lambda *given, **more: grouped(
        *given, **more | {"use_message_queue_broadcaster": False, "use_device_communicator": False}
    )
    torch.fx.experimental._config.meta_nonzero_assume_all_nonzero = True
    registry._run_in_subprocess = lambda function: function()  # where H100s are not believed in
    models.make_layers.__code__ = few_layers.__code__  # every class has imported the function itself
    models.FIRST = FIRST
    import tvm_ffi
    import xgrammar

    sys.modules["cuda"] = MagicMock()  # memory that processes share, for one fused kernel
    import vllm.model_executor.layers.minimax_rms_norm.lamport_workspace as shared

    del sys.modules["cuda"]
    for name in [name for name in vars(shared) if "workspace" in name.lower()]:
        setattr(shared, name, MagicMock())
    return tvm_ffi, xgrammar


def few_layers(num_hidden_layers, layer_fn, prefix):
    """Stand in for vLLM's `make_layers`."""
    import torch
    from vllm.model_executor.models.utils import FIRST, PPMissingLayer

    wanted = {*range(FIRST), num_hidden_layers - 2, num_hidden_layers - 1}
    layers = [
        layer_fn(prefix=f"{prefix}.{place}") if place in wanted else PPMissingLayer()
        for place in range(num_hidden_layers)
    ]
    return 0, num_hidden_layers, torch.nn.ModuleList(layers)


def language_model(folder, into):
    """Return a folder with the config.json of a model's language model alone."""
    config = json.loads((folder / "config.json").read_text())
    (architecture,) = config["architectures"]
    if architecture not in TEXT:
        return folder
    kept = {name: config[name] for name in ("quantization_config", "tie_word_embeddings", "dtype") if name in config}
    text = kept | config["text_config"] | {"architectures": [TEXT[architecture]]}
    if TEXT[architecture] == "DeepseekV3ForCausalLM":
        text["model_type"] = "deepseek_v3"
    made = Path(into) / folder.name
    shutil.copytree(folder, made)
    (made / "config.json").write_text(json.dumps({name: text[name] for name in text if name != "auto_map"}))
    return made


def refusal(folder, tensor_parallel_size, is_expert_parallel):
    """Return what vLLM says against a layout, or None."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    size, group = tensor_parallel_size, {"backend": "fake", "rank": 0, "world_size": tensor_parallel_size}
    try:
        config = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, load_format="dummy", max_model_len=4096, enforce_eager=True,
            tensor_parallel_size=size, enable_expert_parallel=is_expert_parallel, distributed_executor_backend="mp",
        ).create_engine_config()  # fmt: skip
        torch.distributed.init_process_group(store=FakeStore(), **group)
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(distributed_init_method="alone", local_rank=0, **group)
            parallel_state.initialize_model_parallel(size)
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"), on_meta():
            initialize_model(config)
    except Exception as error:  # classes refuse with any kind of error
        return str(error).partition("Value error, ")[2].partition(" [type=")[0] or repr(error)
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    return None


def on_meta():
    """Return a context in which tensors for any device are on the meta device."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnMeta(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if kwargs.get("device") is not None:
                kwargs["device"] = "meta"
            if function is torch.Tensor.item:
                return 0
            return function(*args, **kwargs)

    return OnMeta()


def main():
    """Answer each question: a folder, sizes of tensor parallelism, and whether experts are left whole."""
    answers, sys.stdout = sys.stdout, sys.stderr
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    be_on_h100s()
    be_alone()
    with tempfile.TemporaryDirectory() as into:
        found = []
        for folder, *layouts in json.load(sys.stdin):
            model = language_model(Path(folder), into)
            found.append([refusal(model, *layout) for layout in layouts])
    json.dump(found, answers)


if __name__ == "__main__":
    main()
