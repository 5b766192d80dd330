<?xml version="1.0"?>
<!-- Adds to a machine settings that the provider does not support. -->
<xsl:stylesheet version="1.0" xmlns:xsl="http://www.w3.org/1999/XSL/Transform">
  <xsl:template match="@*|node()">
    <xsl:copy><xsl:apply-templates select="@*|node()"/></xsl:copy>
  </xsl:template>

  <!-- the first disk boots; the node finds its state disk by its serial number -->
  <xsl:template match="devices/disk[1]">
    <xsl:copy><xsl:apply-templates select="@*|node()"/><boot order="1"/></xsl:copy>
  </xsl:template>
  <xsl:template match="devices/disk[2]">
    <xsl:copy><xsl:apply-templates select="@*|node()"/><serial>state</serial></xsl:copy>
  </xsl:template>

  <!-- the firmware would run the network card's option ROM before the image, and measure it -->
  <xsl:template match="devices/interface">
    <xsl:copy><xsl:apply-templates select="@*|node()"/><rom bar="off"/></xsl:copy>
  </xsl:template>

  <xsl:template match="devices/tpm">
    <tpm model="tpm-crb"><xsl:apply-templates select="node()"/></tpm>
  </xsl:template>

  <!-- the console has the name of the machine's attestation key -->
  <xsl:template match="devices/console">
    <xsl:copy><xsl:apply-templates select="@*|node()"/><log file="${log}" append="on"/></xsl:copy>
  </xsl:template>

  <!-- the provider's own: a screen, and a channel to an agent that the image does not have -->
  <xsl:template match="devices/graphics | devices/video | devices/channel"/>
</xsl:stylesheet>
