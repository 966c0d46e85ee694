"""Names of devices, as kvd writes them and as people do."""

import pytest

from kvd_proto.devices import HOST, cuda_device, is_cuda_device, means_device

UUID = bytes.fromhex("89320f93a1b2c3d4e5f60123456789ab")
DASHED = "89320f93-a1b2-c3d4-e5f6-0123456789ab"
GPU, SLICE = cuda_device(UUID), cuda_device(UUID, mig=True)


def test_a_name_is_the_uuid_and_never_an_index() -> None:
    """Both names are taken for devices; an index, the host and a short UUID are not."""
    assert is_cuda_device(GPU)
    assert is_cuda_device(SLICE)
    assert not any(map(is_cuda_device, ("cuda:0", HOST, "cuda:89320f93")))
    with pytest.raises(ValueError, match="16 bytes"):
        cuda_device(b"short")


@pytest.mark.parametrize(
    "text", [GPU, f"GPU-{DASHED}", f"gpu-{DASHED}", DASHED, "GPU-89320f93", "cuda:89320F93a1b2"]
)
def test_a_gpu_is_meant_in_every_form(text: str) -> None:
    """What nvidia-smi prints, what CUDA_VISIBLE_DEVICES takes, what kvd writes."""
    assert means_device(text, GPU)


@pytest.mark.parametrize("text", [SLICE, f"MIG-{DASHED}", "MIG-89320f93", f"cuda:mig-{DASHED}"])
def test_a_slice_is_meant_in_every_form(text: str) -> None:
    """The same for a MIG instance; its form never means a whole GPU, nor the other way round."""
    assert means_device(text, SLICE)
    assert not means_device(text, GPU)
    assert not means_device(f"GPU-{DASHED}", SLICE)


@pytest.mark.parametrize("text", ["0", "cuda:0", "GPU-8932", "GPU-99320f93", "", HOST, "GPU-"])
def test_anything_else_means_no_device(text: str) -> None:
    """Indices, forms that are too short, other devices; the host is the host alone."""
    assert not means_device(text, GPU)
    assert means_device(text, HOST) == (text == HOST)
