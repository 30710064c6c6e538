"""The model: a Llama-family decoder, its first weights, its Hugging Face layout, and text from it.

Import from the modules (`decoder`, `initialise`, `hugging_face`, `generate`): they need torch, this package does not.
"""
