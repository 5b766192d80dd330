# Device files of an emulated TPM: terminals, whose other ends are connections to the emulation. What is written to one of them is a
# command; then its response is read. A terminal says that there is nothing more after five seconds without a byte, as a device
# says at once. Ends with its standard input.
#
#   device.py PATH PORT..      makes PATH for PORT, and prints a line when all are there

import os, pty, select, socket, sys, termios, tty

ends = {}
keep = []  # a terminal that nobody has open is gone
for path, port in zip(sys.argv[1::2], sys.argv[2::2]):
    near, far = pty.openpty()
    tty.setraw(far)
    settings = termios.tcgetattr(far)
    settings[6][termios.VMIN], settings[6][termios.VTIME] = 0, 50
    termios.tcsetattr(far, termios.TCSANOW, settings)
    os.symlink(os.ttyname(far), path)
    keep.append(far)
    ends[near] = int(port)
print("ready", flush=True)


def exactly(read, count, got=b""):
    while len(got) < count:
        got += read(count - len(got))
    return got


def message(read):
    head = exactly(read, 10)
    return exactly(read, int.from_bytes(head[2:6], "big"), head)


while True:
    ready, _, _ = select.select([0, *ends], [], [])
    if 0 in ready:
        break
    for near in ready:
        command = message(lambda count: os.read(near, count))
        with socket.create_connection(("127.0.0.1", ends[near])) as tpm:
            tpm.sendall(command)
            os.write(near, message(tpm.recv))
