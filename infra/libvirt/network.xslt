<?xml version="1.0"?>
<!-- Takes the range of addresses that the provider gives to unknown machines. -->
<xsl:stylesheet version="1.0" xmlns:xsl="http://www.w3.org/1999/XSL/Transform">
  <xsl:template match="@*|node()">
    <xsl:copy><xsl:apply-templates select="@*|node()"/></xsl:copy>
  </xsl:template>
  <xsl:template match="dhcp/range"/>
</xsl:stylesheet>
