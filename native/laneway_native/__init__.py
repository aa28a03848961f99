"""The cffi binding to llama.cpp."""
