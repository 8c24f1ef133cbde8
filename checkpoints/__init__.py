"""Reading and writing model files: Hugging Face, Meta, GGUF and Orbax. No model code."""
