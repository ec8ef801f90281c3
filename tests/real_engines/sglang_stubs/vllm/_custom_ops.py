def rotary_embedding(*arguments):
    raise NotImplementedError("SGLang computes this itself on a CPU")
