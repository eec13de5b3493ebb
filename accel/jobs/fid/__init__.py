"""Sample a folder of pictures for FID on any number of ranks. A job that was killed at any point
resumes with the same command.

    <folder>/000000.png …        complete pictures: a file gets its name when it is on disk
    <folder>/.job/settings.json  all settings that affect a bit; resuming with others is refused
    <folder>/.job/lock           locked by the running job
    <folder>/.job/npz.json       SHA-256 of the archive
    <folder>/.job/…              GEMM algorithms chosen by the autotuner, on a GPU
    <folder>.npz                 arr_0 (N, H, W, 3) uint8, the input of FID evaluators

job.py is the job; folder.py plans its batches and owns the folder; noise.py draws noise and labels;
npz.py writes the archive.
"""
