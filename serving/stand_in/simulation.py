"""Our own settings of a stand-in, beside the flags of the engine that it stands in for."""

from dataclasses import dataclass

from foundation.settings import CheckedSettings, NotNegative, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig(CheckedSettings):
    """What takes the place of the GPUs."""

    gpu: str | None = None
    """GPU that the model would run on, such as h100 (`dynabench hardware` lists them): its step times and its memory are
    predicted (none: generic step times)."""

    timing_file: str | None = None
    """File of step times measured on a real engine: from `dynabench calibrate`, or a table (.npz, .csv, .parquet)."""

    model_shape: str | None = None
    """The model's shape, if MODEL is not bundled: a bundled model's Hugging Face id, or a folder or file with a
    config.json."""

    link_gbps: Positive | None = None
    """Bandwidth of all-reduces between the engine's GPUs (GB/s of NCCL's bus bandwidth), if it differs from the bundled
    GPU's."""

    speedup_ratio: NotNegative = 1.0
    """Divide every step's duration by this (0: steps take no time)."""

    decode_speedup_ratio: NotNegative = 1.0
    """Also divide the decode part of a step's duration by this (0: it takes no time)."""

    @property
    def predicts(self) -> bool:
        """Whether step times are predicted for a GPU."""
        return self.gpu is not None and self.timing_file is None
