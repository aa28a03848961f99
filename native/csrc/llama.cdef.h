const char *laneway_llama_version(void);
