"""Names of devices."""

import pytest

from kvd_proto.devices import HOST, cuda_device, is_cuda_device

UUID = bytes.fromhex("89320f93a1b2c3d4e5f60123456789ab")
GPU, SLICE = cuda_device(UUID), cuda_device(UUID, mig=True)


def test_a_name_is_the_uuid_and_never_an_index() -> None:
    """Both names are taken for devices; an index, the host and a short UUID are not."""
    assert is_cuda_device(GPU)
    assert is_cuda_device(SLICE)
    assert not any(map(is_cuda_device, ("cuda:0", HOST, "cuda:89320f93")))
    with pytest.raises(ValueError, match="16 bytes"):
        cuda_device(b"short")
