"""The model: a Llama-family decoder, its first weights, its Hugging Face layout, and text generation.

Import from the modules (`decoder`, `initialise`, `hugging_face`, `generate`). They need torch, but this package does
not.
"""
