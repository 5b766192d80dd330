#!/usr/bin/env bash
# Makes, once, the keys of the test that the profile `kubernetes` of the image trusts, and prints their folder: `maker` signs updates,
# `server` is the key of the web server that has them.
. "$(dirname "$0")/../../tools/lib.sh"

keys=$ROOT/target/whole-keys
if [ -e "$keys" ]; then echo "$keys"; exit; fi
rm -rf "$keys.new"; mkdir -p "$keys.new"
ssh-keygen -q -t ed25519 -N '' -C maker -f "$keys.new/maker"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj /CN=releases \
  -addext subjectAltName=IP:10.89.0.1 -addext basicConstraints=critical,CA:FALSE \
  -keyout "$keys.new/server.key" -out "$keys.new/server.pem" 2>/dev/null
mv "$keys.new" "$keys"
echo "$keys"
