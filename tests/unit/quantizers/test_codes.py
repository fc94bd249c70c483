"""E4M3 payload bytes against ml_dtypes."""

import ml_dtypes
import numpy as np
import torch

from megatron_snip.quantizers.codes import decode_e4m3, encode_e4m3


def test_all_codes_go_there_and_back():
    codes = torch.arange(256).to(torch.uint8)
    values = decode_e4m3(codes)
    wanted = codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(values.numpy(), wanted, equal_nan=True)
    nan = values.isnan()
    assert torch.equal(encode_e4m3(values)[~nan], codes[~nan])
    assert (encode_e4m3(values)[nan] == 0x7F).all()
