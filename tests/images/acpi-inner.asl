// Loaded by acpi.asl: writes when it is loaded.
DefinitionBlock ("", "SSDT", 2, "HOST", "INNER", 1)
{
  OperationRegion (INNR, SystemMemory, @DOMAIN@, 8)
  Field (INNR, ByteAcc, NoLock, Preserve) { N0, 8, N1, 8, N2, 8, N3, 8, N4, 8 }
  N0 = 0x50 N1 = 0x57 N2 = 0x4e N3 = 0x44 N4 = 0
}
