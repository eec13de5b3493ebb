"""The jobs of the commands. Each samples with a Pipeline.

grid.py       pictures of chosen classes, as one image or one folder per seed
parallel.py   a grid on several ranks
record.py     the settings in a picture's file
fid/          a folder of many pictures for FID
"""
