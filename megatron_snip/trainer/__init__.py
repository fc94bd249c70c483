"""The embedded trainer: a Llama on Megatron-Core, on GPUs or on a CPU.

Read it in this order:

fields            the settings, with Megatron's argument names
config            reads the settings and checks that they fit each other
launch            starts the ranks
session           a run: checks, process group, files, progress
data              the built-in text, Megatron's GPTDataset, the order of samples
model             GPTModel, DistributedDataParallel, optimizer
initial_weights   the same in every layout
loop              the training loop
checkpoint        save, load, resume
"""
