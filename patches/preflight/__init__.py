"""A job's real model, stage by stage on the meta device, in a world without other ranks."""
