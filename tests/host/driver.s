# A driver for UEFI that prints a word and ends well. Assembled by tests/host/images.rs.
.intel_syntax noprefix
.globl start
start:
  sub rsp, 40
  # EFI_SYSTEM_TABLE.ConOut, and its OutputString
  mov rcx, [rdx + 64]
  lea rdx, [rip + mark]
  call [rcx + 8]
  xor eax, eax
  add rsp, 40
  ret
.data
.balign 8
# not named `word`, which is a size in this syntax
mark: .string16 "\r\nhost-runs-driver\r\n"
# a program for UEFI must have something to relocate
.balign 8
.quad mark
