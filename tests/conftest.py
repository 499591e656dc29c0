"""What holds for every test: one thread for each parallel region, as the machine may be shared."""

import torch

torch.set_num_threads(1)
