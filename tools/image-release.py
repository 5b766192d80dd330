#!/usr/bin/env python3
"""Takes the parts of an update from a disk image of mkosi, and writes the list of them.

  tools/image-release.py IMAGE.raw VERSION FOLDER    FOLDER has firstlight.efi; it gets root.img, hashes.img and release.json
"""
import hashlib, json, os, subprocess, sys

BLOCK = 1 << 20
image, version, folder = sys.argv[1:]
table = json.loads(subprocess.check_output(["/sbin/sfdisk", "--json", image]))["partitiontable"]["partitions"]
offset = {partition["name"]: partition["start"] * 512 for partition in table}


def copy(partition, size, name):
    """Copies the first `size` bytes of a partition."""
    with open(image, "rb") as disk, open(os.path.join(folder, name), "wb") as part:
        disk.seek(offset[partition])
        while size:
            data = disk.read(min(size, BLOCK))
            part.write(data)
            size -= len(data)


def described(name):
    with open(os.path.join(folder, name), "rb") as file:
        return {"size": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


# The superblock of dm-verity (https://gitlab.com/cryptsetup/cryptsetup/-/wikis/DMVerity): block sizes and number of data blocks
with open(image, "rb") as disk:
    disk.seek(offset["firstlight-a-verity"])
    superblock = disk.read(512)
assert superblock.startswith(b"verity\0\0"), "there are no hashes in the partition firstlight-a-verity"
number = lambda at, size: int.from_bytes(superblock[at : at + size], "little")
data_block, hash_block, blocks = number(64, 4), number(68, 4), number(72, 8)
copy("firstlight-a", blocks * data_block, "root.img")
# a block for the superblock, and one level of the tree above the other
hashes, level = 1, blocks
while level > 1:
    level = -(-level // (hash_block // 32))
    hashes += level
copy("firstlight-a-verity", hashes * hash_block, "hashes.img")
release = {"version": version, "image": described("firstlight.efi"), "root": described("root.img"), "hashes": described("hashes.img")}
with open(os.path.join(folder, "release.json"), "w") as file:
    json.dump(release, file, indent=2)
    file.write("\n")
