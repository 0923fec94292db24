"""Packed image folders: few large files instead of a million small ones. docs/records.md says why in this format.

shards     the Arrow files that hold the pictures
index      where in them each picture lies
manifest   what a records folder holds; it is written last, so a folder that has one is complete
dataset    reads it for training
plan       which picture goes into which shard, and what is already done
pack       fills the shards, in several processes; store is what becomes of one picture
verify     reads everything back
__main__   `python3 -m image_classification.data.records pack|verify|info`
"""
