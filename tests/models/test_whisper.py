"""Whisper's times of words, which transformers computes from the weights of cross attention."""

import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

import headwise as hw

SIZES = {
    "vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 19, "decoder_ffn_dim": 19, "num_mel_bins": 8,
    "max_source_positions": 50, "max_target_positions": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 3, "begin_suppress_tokens": None, "suppress_tokens": None,
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_times_of_tokens_are_those_of_eager_attention():
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**SIZES)).eval()
    how = model.generation_config
    how.alignment_heads, how.no_timestamps_token_id = [[0, 1], [1, 0]], 50
    features = torch.randn(1, 8, 100)

    def times() -> torch.Tensor:
        found = model.generate(features, return_token_timestamps=True, max_new_tokens=12, min_new_tokens=12,
                               return_dict_in_generate=True, num_frames=torch.tensor([100]))  # fmt: skip
        return found["token_timestamps"]

    model.set_attn_implementation("eager")
    theirs = times()
    with hw.attach(model):
        ours = times()
    assert torch.equal(ours, theirs)
    assert len(theirs.unique()) > 2
