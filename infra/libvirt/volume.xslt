<?xml version="1.0"?>
<!-- A state disk takes only the space that is written. -->
<xsl:stylesheet version="1.0" xmlns:xsl="http://www.w3.org/1999/XSL/Transform">
  <xsl:template match="@*|node()">
    <xsl:copy><xsl:apply-templates select="@*|node()"/></xsl:copy>
  </xsl:template>
  <xsl:template match="volume/capacity">
    <xsl:copy-of select="."/>
    <allocation>0</allocation>
  </xsl:template>
</xsl:stylesheet>
