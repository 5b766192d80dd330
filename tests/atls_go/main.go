// A peer for the attested TLS tests: Go's own crypto/tls with the rules of Constellation's protocol, the dummy variant.
//
//	atls-go server -mode=server|client|mutual|none [flags]   prints "listening ADDRESS", serves until its standard input ends
//	atls-go client -mode=... -addr=ADDRESS [flags]           one connection (or -n of them), exit code 0 if all went well
//
// Each connection carries one line from the client, which the server sends back with "echo " before it. Only the standard
// library is used, so that it builds without a network.
package main

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

var (
	mode      = flag.String("mode", "server", "who attests: server, client, mutual, none")
	addr      = flag.String("addr", "127.0.0.1:0", "where to listen, or whom to call")
	version   = flag.String("tls", "", "1.2 or 1.3 only")
	issueOID  = flag.String("issue-oid", "1.3.9900.1.1", "variant that is issued")
	checkOID  = flag.String("check-oid", "1.3.9900.1.1", "variant that is accepted")
	badNonce  = flag.Bool("bad-nonce", false, "issue documents for another nonce")
	badKey    = flag.Bool("bad-key", false, "issue documents for another key")
	noIssuer  = flag.Bool("no-issuer", false, "send a certificate without a document although the mode has one")
	sni       = flag.String("sni", "", "server name instead of a nonce")
	noSNI     = flag.Bool("no-sni", false, "no server name")
	alpn      = flag.String("alpn", "http/1.1,h2", "protocols, comma-separated; empty for none")
	curve     = flag.String("curve", "", "key exchange: mlkem (exit code 3 if this Go has no X25519MLKEM768), x25519, p256 or p384 only; retry: a client's only share is of a group that few servers know")
	fragment  = flag.Int("fragment", 0, "split the ClientHello into records of this many bytes")
	count     = flag.Int("n", 1, "connections one after the other")
	parallel  = flag.Int("parallel", 1, "connections at a time")
	age       = flag.Duration("age", 0, "how far the certificate's validity lies in the past")
	bigDoc    = flag.Int("pad", 0, "bytes of padding in the document")
	firstOID  = flag.String("first-oid", "", "an extension of this OID before the document")
	critical  = flag.Bool("critical", false, "an unknown critical extension")
	clientEKU = flag.Bool("client-eku", false, "extended key usage clientAuth only")
	strong    = flag.Bool("strong", false, "the strong form")
	joining   = flag.Bool("join-service", false, "in the strong form, the server proves itself as a join service, and the client expects one")
	chatty    = flag.Bool("chatty", false, "write twice, with pauses, before the first read, as HTTP/2 clients may")
	size      = flag.Int("bytes", 0, "bytes that the client sends at once instead of a line; the server echoes all of them")
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "server or client?")
		os.Exit(2)
	}
	flag.CommandLine.Parse(os.Args[2:])
	var err error
	switch os.Args[1] {
	case "server":
		err = serve()
	case "client":
		err = call()
	default:
		err = errors.New("server or client?")
	}
	if err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
}

func (r role) issues() bool    { return !*noIssuer && (*mode == "mutual" || *mode == string(r)) }
func (r role) validates() bool { return *mode == "mutual" || (*mode != "none" && *mode != string(r)) }

type role string

type document struct {
	UserData []byte
	Nonce    []byte
}

func parseOID(text string) asn1.ObjectIdentifier {
	var oid asn1.ObjectIdentifier
	for _, part := range strings.Split(text, ".") {
		number, err := strconv.Atoi(part)
		if err != nil {
			panic(err)
		}
		oid = append(oid, number)
	}
	return oid
}

// certificate makes a key and a self-signed certificate, with a document if this role issues.
func certificate(r role, nonce []byte) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 128))
	if err != nil {
		return nil, err
	}
	now := time.Now().Add(-*age)
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "Constellation"},
		NotBefore:    now.Add(-2 * time.Hour),
		NotAfter:     now.Add(2 * time.Hour),
	}
	if *firstOID != "" {
		template.ExtraExtensions = append(template.ExtraExtensions, pkix.Extension{Id: parseOID(*firstOID), Value: []byte("{}")})
	}
	if *critical {
		extension := pkix.Extension{Id: parseOID("1.3.9900.99.1"), Value: []byte("x"), Critical: true}
		template.ExtraExtensions = append(template.ExtraExtensions, extension)
	}
	if *clientEKU {
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	}
	if r.issues() && !*strong {
		hash := sha256.Sum256(public)
		if *badNonce {
			nonce = bytes.Repeat([]byte{7}, 32)
		}
		if *badKey {
			hash[0] ^= 1
		}
		doc, err := json.Marshal(document{hash[:], nonce})
		if err != nil {
			return nil, err
		}
		doc = append(doc, bytes.Repeat([]byte{' '}, *bigDoc)...)
		template.ExtraExtensions = append(template.ExtraExtensions, pkix.Extension{Id: parseOID(*issueOID), Value: doc})
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// verify checks the first certificate as Constellation does: as its own root, then by its document.
func verify(r role, raw [][]byte, nonce []byte) error {
	if len(raw) == 0 {
		return errors.New("no certificate")
	}
	cert, err := x509.ParseCertificate(raw[0])
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	if _, err := cert.Verify(x509.VerifyOptions{Roots: roots}); err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(cert.PublicKey)
	if err != nil {
		return err
	}
	if !r.validates() || *strong {
		return nil
	}
	for _, extension := range cert.Extensions {
		if !extension.Id.Equal(parseOID(*checkOID)) {
			continue
		}
		var doc document
		if err := json.Unmarshal(extension.Value, &doc); err != nil {
			return err
		}
		if !bytes.Equal(doc.Nonce, nonce) {
			return errors.New("invalid nonce")
		}
		hash := sha256.Sum256(public)
		if !bytes.Equal(doc.UserData, hash[:]) {
			return errors.New("certificate hash does not match user data")
		}
		return nil
	}
	return errors.New("certificate does not contain attestation document")
}

func common() *tls.Config {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	switch *version {
	case "1.2":
		config.MaxVersion = tls.VersionTLS12
	case "1.3":
		config.MinVersion = tls.VersionTLS13
	}
	if *alpn != "" {
		config.NextProtos = strings.Split(*alpn, ",")
	}
	if *strong {
		config.NextProtos = []string{strongALPN}
	}
	switch *curve {
	case "mlkem":
		if hybrid == 0 {
			fmt.Fprintln(os.Stderr, "this version of Go has no X25519MLKEM768")
			os.Exit(3)
		}
		config.CurvePreferences = []tls.CurveID{hybrid}
	case "x25519":
		config.CurvePreferences = []tls.CurveID{tls.X25519}
	case "p256":
		config.CurvePreferences = []tls.CurveID{tls.CurveP256}
	case "p384":
		config.CurvePreferences = []tls.CurveID{tls.CurveP384}
	case "retry":
		config.CurvePreferences = []tls.CurveID{unusualCurve, tls.CurveP384}
	}
	return config
}

// serverConfig makes the configuration of one connection.
func serverConfig() (*tls.Config, error) {
	config := common()
	config.GetCertificate = func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		nonce, err := base64.StdEncoding.DecodeString(hello.ServerName)
		if err != nil {
			return nil, err
		}
		return certificate("server", nonce)
	}
	if role("server").validates() && !*strong {
		nonce := make([]byte, 32)
		if _, err := rand.Read(nonce); err != nil {
			return nil, err
		}
		authority, err := authorityFor(nonce)
		if err != nil {
			return nil, err
		}
		config.ClientAuth = tls.RequireAnyClientCert
		config.ClientCAs = x509.NewCertPool()
		config.ClientCAs.AddCert(authority)
		config.VerifyPeerCertificate = func(raw [][]byte, _ [][]*x509.Certificate) error {
			return verify("server", raw, nonce)
		}
	}
	return config, nil
}

// authorityFor makes a certificate whose subject carries the nonce into the CertificateRequest.
func authorityFor(nonce []byte) (*x509.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(0),
		Subject:      pkix.Name{CommonName: base64.StdEncoding.EncodeToString(nonce)},
	}
	subject, err := asn1.Marshal(template.Subject.ToRDNSequence())
	if err != nil {
		return nil, err
	}
	return &x509.Certificate{Raw: []byte{0}, RawSubject: subject, PublicKey: &key.PublicKey}, nil
}

func clientConfig() (*tls.Config, error) {
	config := common()
	nonce := make([]byte, 32)
	if _, err := rand.Read(nonce); err != nil {
		return nil, err
	}
	config.InsecureSkipVerify = true
	config.ServerName = base64.StdEncoding.EncodeToString(nonce)
	if *sni != "" {
		config.ServerName = *sni
	}
	if *noSNI {
		config.ServerName = ""
	}
	config.VerifyPeerCertificate = func(raw [][]byte, _ [][]*x509.Certificate) error {
		return verify("client", raw, nonce)
	}
	config.GetClientCertificate = func(request *tls.CertificateRequestInfo) (*tls.Certificate, error) {
		if len(request.AcceptableCAs) != 1 {
			return nil, errors.New("unexpected acceptableCAs length")
		}
		var names pkix.RDNSequence
		if _, err := asn1.Unmarshal(request.AcceptableCAs[0], &names); err != nil {
			return nil, err
		}
		for _, set := range names {
			for _, attribute := range set {
				if !attribute.Type.Equal(asn1.ObjectIdentifier{2, 5, 4, 3}) {
					continue
				}
				text, ok := attribute.Value.(string)
				if !ok {
					return nil, errors.New("CN is no string")
				}
				nonce, err := base64.StdEncoding.DecodeString(text)
				if err != nil {
					return nil, err
				}
				return certificate("client", nonce)
			}
		}
		return nil, errors.New("CN not found")
	}
	return config, nil
}

func serve() error {
	listener, err := net.Listen("tcp", *addr)
	if err != nil {
		return err
	}
	go func() {
		io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	fmt.Println("listening", listener.Addr())
	for {
		socket, err := listener.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer socket.Close()
			socket.SetDeadline(time.Now().Add(60 * time.Second))
			if err := serveOne(socket); err != nil {
				fmt.Println("refused:", err)
			}
		}()
	}
}

func serveOne(socket net.Conn) error {
	config, err := serverConfig()
	if err != nil {
		return err
	}
	var sent []byte
	if *strong {
		bare, err := certificate("server", nil)
		if err != nil {
			return err
		}
		sent = bare.Certificate[0]
		config.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return bare, nil }
	}
	conn := tls.Server(socket, config)
	if err := conn.Handshake(); err != nil {
		return err
	}
	defer conn.Close()
	if *strong {
		if err := exchange("server", conn, sent); err != nil {
			return err
		}
	}
	if *size > 0 {
		_, err := io.Copy(conn, conn)
		return err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return err
	}
	_, err = io.WriteString(conn, "echo "+line)
	return err
}

func call() error {
	start := time.Now()
	work := make(chan struct{})
	failed := make(chan error, *parallel)
	var workers sync.WaitGroup
	for i := 0; i < *parallel; i++ {
		workers.Add(1)
		go func() {
			defer workers.Done()
			for range work {
				if err := callOne(); err != nil {
					select {
					case failed <- err:
					default:
					}
				}
			}
		}()
	}
	for i := 0; i < *count; i++ {
		work <- struct{}{}
	}
	close(work)
	workers.Wait()
	select {
	case err := <-failed:
		return err
	default:
	}
	var usage syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
	cpu := time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	fmt.Printf("done %d connections wall_us %d cpu_us %d\n", *count, time.Since(start).Microseconds(), cpu.Microseconds())
	return nil
}

func callOne() error {
	config, err := clientConfig()
	if err != nil {
		return err
	}
	socket, err := net.Dial("tcp", *addr)
	if err != nil {
		return err
	}
	defer socket.Close()
	socket.SetDeadline(time.Now().Add(60 * time.Second))
	var wire net.Conn = socket
	if *fragment > 0 {
		wire = &fragmenting{Conn: socket, size: *fragment}
	}
	conn := tls.Client(wire, config)
	if err := conn.Handshake(); err != nil {
		return err
	}
	defer conn.Close()
	if *alpn != "" && conn.ConnectionState().NegotiatedProtocol == "" {
		return errors.New("missing selected ALPN property")
	}
	if *strong {
		if err := exchange("client", conn, conn.ConnectionState().PeerCertificates[0].Raw); err != nil {
			return err
		}
	}
	if *count == 1 {
		fmt.Println("alpn", conn.ConnectionState().NegotiatedProtocol)
	}
	if *size > 0 {
		return callBulk(conn)
	}
	if *chatty {
		for i := 0; i < 2; i++ {
			time.Sleep(20 * time.Millisecond)
			if _, err := io.WriteString(conn, "hello\n"); err != nil {
				return err
			}
		}
	} else if _, err := io.WriteString(conn, "hello\n"); err != nil {
		return err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return err
	}
	if line != "echo hello\n" {
		return fmt.Errorf("got %q", line)
	}
	return nil
}

// callBulk sends while it receives the echo.
func callBulk(conn *tls.Conn) error {
	data := make([]byte, *size)
	rand.Read(data)
	sent := make(chan error, 1)
	go func() {
		_, err := conn.Write(data)
		sent <- err
	}()
	got := make([]byte, *size)
	if _, err := io.ReadFull(conn, got); err != nil {
		return err
	}
	if !bytes.Equal(data, got) {
		return errors.New("the echo differs")
	}
	return <-sent
}

// fragmenting splits the first record that is written into smaller records.
type fragmenting struct {
	net.Conn
	size int
	done bool
}

func (f *fragmenting) Write(record []byte) (int, error) {
	if f.done || len(record) < 5 || record[0] != 22 {
		return f.Conn.Write(record)
	}
	f.done = true
	length := int(record[3])<<8 | int(record[4])
	payload, rest := record[5:5+length], record[5+length:]
	var out []byte
	for len(payload) > 0 {
		part := payload
		if len(part) > f.size {
			part = part[:f.size]
		}
		payload = payload[len(part):]
		out = append(out, 22, record[1], record[2], byte(len(part)>>8), byte(len(part)))
		out = append(out, part...)
	}
	if _, err := f.Conn.Write(append(out, rest...)); err != nil {
		return 0, err
	}
	return len(record), nil
}
