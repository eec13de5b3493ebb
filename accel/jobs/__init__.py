"""The jobs of the commands. Each samples with a Pipeline.

grid.py       pictures of chosen classes, as one image or one folder per seed, with their settings
parallel.py   a grid on several ranks
fid/          a folder of many pictures for FID
"""
