package main

// The strong form of attested TLS, written only from docs/protocol.md: a second implementation, which shows that the page is
// sufficient.

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/asn1"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

const strongALPN = "firstlight-attested/1"

// field is one field of a Protocol Buffers message: a number, or bytes.
type field struct {
	number uint64
	value  uint64
	bytes  []byte
}

func putBytes(message []byte, number uint64, value []byte) []byte {
	message = binary.AppendUvarint(message, number<<3|2)
	message = binary.AppendUvarint(message, uint64(len(value)))
	return append(message, value...)
}

func parse(message []byte) ([]field, error) {
	var fields []field
	next := func() (uint64, error) {
		value, n := binary.Uvarint(message)
		if n <= 0 {
			return 0, errors.New("malformed message")
		}
		message = message[n:]
		return value, nil
	}
	for len(message) > 0 {
		tag, err := next()
		if err != nil {
			return nil, err
		}
		value, err := next()
		if err != nil {
			return nil, err
		}
		parsed := field{number: tag >> 3, value: value}
		switch tag & 7 {
		case 0:
		case 2:
			if value > uint64(len(message)) {
				return nil, errors.New("malformed message")
			}
			parsed.bytes, message = message[:value], message[value:]
		default:
			return nil, errors.New("malformed message")
		}
		if parsed.number == 15 && parsed.value != 0 {
			return nil, fmt.Errorf("the peer ends the exchange with alert %d", parsed.value)
		}
		fields = append(fields, parsed)
	}
	return fields, nil
}

func find(fields []field, number uint64) ([]byte, bool) {
	for _, field := range fields {
		if field.number == number {
			return field.bytes, true
		}
	}
	return nil, false
}

func send(conn io.Writer, message []byte) error {
	_, err := conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(message))), message...))
	return err
}

func receive(conn io.Reader, most uint32) ([]byte, []field, error) {
	var length uint32
	if err := binary.Read(conn, binary.BigEndian, &length); err != nil {
		return nil, nil, err
	}
	if length > most {
		return nil, nil, errors.New("the message is too long")
	}
	message := make([]byte, length)
	if _, err := io.ReadFull(conn, message); err != nil {
		return nil, nil, err
	}
	fields, err := parse(message)
	return message, fields, err
}

func digest(parts ...[]byte) []byte {
	hash := sha256.New()
	for _, part := range parts {
		hash.Write(binary.BigEndian.AppendUint32(nil, uint32(len(part))))
		hash.Write(part)
	}
	return hash.Sum(nil)
}

func userData(r role, session []byte) []byte {
	if r == "server" && *joining {
		r = "join service"
	}
	return digest([]byte("firstlight attested TLS, version 1"), []byte(r), session, nil)
}

// exchange runs the strong form as one of the roles. The server's certificate is DER.
func exchange(r role, conn *tls.Conn, server []byte) error {
	peer := role("server")
	if r == "server" {
		peer = "client"
	}
	nonce := make([]byte, 32)
	if _, err := rand.Read(nonce); err != nil {
		return err
	}
	own := putBytes(nil, 1, nonce)
	if r.validates() {
		// SHA-256 is 0x000b
		own = putBytes(own, 2, putBytes(nil, 1, []byte{0x0b}))
	}
	if r.issues() {
		variant, err := asn1.Marshal(parseOID(*issueOID))
		if err != nil {
			return err
		}
		own = putBytes(own, 3, putBytes(nil, 1, variant))
	}
	if r == "client" {
		if err := send(conn, own); err != nil {
			return err
		}
	}
	theirs, offer, err := receive(conn, 16<<10)
	if err != nil {
		return err
	}
	if r == "server" {
		if err := send(conn, own); err != nil {
			return err
		}
	}
	state := conn.ConnectionState()
	exporter, err := state.ExportKeyingMaterial("EXPORTER-firstlight-attested-1", nil, 32)
	if err != nil {
		return err
	}
	session := digest(exporter, server, own, theirs)
	if r == "server" {
		session = digest(exporter, server, theirs, own)
	}
	_, demanded := find(offer, 2)

	prove := func() error {
		var proof []byte
		if demanded && r.issues() {
			peersNonce, _ := find(offer, 1)
			data := userData(r, session)
			if *badNonce {
				peersNonce = bytes.Repeat([]byte{7}, 32)
			}
			if *badKey {
				data[0] ^= 1
			}
			doc, err := json.Marshal(document{data, peersNonce})
			if err != nil {
				return err
			}
			proof = putBytes(nil, 1, doc)
		}
		return send(conn, proof)
	}
	verify := func() error {
		_, proof, err := receive(conn, 64<<10)
		if err != nil || !r.validates() {
			return err
		}
		content, _ := find(proof, 1)
		var doc document
		if err := json.Unmarshal(content, &doc); err != nil {
			return err
		}
		if !bytes.Equal(doc.Nonce, nonce) || !bytes.Equal(doc.UserData, userData(peer, session)) {
			return errors.New("the document is for another connection")
		}
		return nil
	}
	if r == "client" {
		if err := verify(); err != nil {
			return err
		}
		if err := prove(); err != nil || !demanded {
			return err
		}
		_, _, err = receive(conn, 4<<10)
		return err
	}
	if err := prove(); err != nil {
		return err
	}
	if err := verify(); err != nil || !r.validates() {
		return err
	}
	return send(conn, nil)
}
