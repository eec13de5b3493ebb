"""Jobs of the commands, by a Pipeline.

grid.py       pictures of chosen classes, in one file or a folder a seed
parallel.py   a grid on many ranks
fid/          a folder of many pictures of random classes
"""
