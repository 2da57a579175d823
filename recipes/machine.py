"""Where and when a measurement was made."""

import os
import platform
import time

import torch

COLUMNS = ("device", "threads", "torch", "python", "time")


def place(device: torch.device) -> dict[str, object]:
    """Device, threads, versions and time, with the keys `COLUMNS`."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }


def processor() -> str:
    """The name of the processor; of its architecture if the system has none."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()
