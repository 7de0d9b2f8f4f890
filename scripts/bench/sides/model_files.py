"""From a GGUF file to what peers read: a Hugging Face folder in bfloat16, and a GGUF file in Q8_0.

    python model_files.py FILE.gguf FOLDER OUT.gguf

Runs in the environment `transformers`. Both forms hold the file's own, dequantized weights: all sides have one model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def write_folder(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    dequantized(source).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def dequantized(source: Path) -> Any:
    """The model of a GGUF file in float32."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    how = GgufConfig(gguf_file=source.name, dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, quantization_config=how
    )


def write_q8_0(source: Path, target: Path) -> None:
    import gguf
    from gguf import GGMLQuantizationType as Kind
    from gguf.quants import dequantize, quantize

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    written_by_writer = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for field in reader.fields.values():
        if not field.name.startswith(written_by_writer):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        # Vectors stay as they are: llama.cpp's own conversion does the same.
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, Kind.Q8_0), raw_dtype=Kind.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    file, folder, q8_0 = map(Path, sys.argv[1:])
    write_folder(file, folder)
    write_q8_0(file, q8_0)
