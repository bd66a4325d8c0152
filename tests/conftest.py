"""For all tests here: the modules of the folder above can be imported, and threads are few."""
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that the tests start
try:
    import torch
    torch.set_num_threads(1)  # models this small gain nothing from more
except ImportError:  # which the tests of the data do without
    pass
