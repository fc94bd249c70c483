"""The embedded trainer: a Llama-style GPT on Megatron-Core, on GPUs or on a laptop's CPU.

Read it in this order:

    config     what to train: Megatron's own argument names, one frozen record
    sizes      the sizes must divide; the linears and stages that follow from them
    checks     all that can be wrong before a run starts
    launch     the front process: starts the ranks, ends with one line when they fail
    worker     the process of a rank          session    its run, from process group to files
    corpus     text as byte tokens in Megatron's indexed format
    data       Megatron's GPTDataset, and the order of its samples
    model      GPTModel, DistributedDataParallel, optimizer, scheduler
    initialize every weight as a function of its global name, the same for every layout
    hooks      what SNIP sees of the loop
    loop       the training loop
"""
