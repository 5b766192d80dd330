// A peer for the gRPC tests: grpc-go, with the options that the programs of Constellation use.
//
//	grpc-go [flags]                             prints "listening ADDRESS", serves until its standard input ends
//	grpc-go -attestation ADDRESS -nonce HEX     asks a verification service, prints the document or "error CODE MESSAGE"
//
// It answers each method whose name ends with Echo with the request. Other methods wait for the end
// of their call, except GetAttestation of Constellation's verification service with -evidence: it sends the nonce to that address,
// which answers with the document. Messages are bytes that it does not parse, so that it needs no generated code.
package main

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

var (
	age     = flag.Duration("age", 0, "MaxConnectionAge; 0: none")
	headers = flag.Uint("headers", 0, "MaxHeaderListSize; 0: the default")
	streams = flag.Uint("streams", 0, "MaxConcurrentStreams; 0: the default")

	evidence    = flag.String("evidence", "", "who makes attestation documents")
	attestation = flag.String("attestation", "", "the verification service that is asked")
	nonce       = flag.String("nonce", "", "the nonce for it, in hex")
)

const getAttestation = "/verify.API/GetAttestation"

// field returns a message whose only field has this number.
func field(number uint64, value []byte) []byte {
	message := binary.AppendUvarint(nil, number<<3|2)
	message = binary.AppendUvarint(message, uint64(len(value)))
	return append(message, value...)
}

// content returns the bytes of a message's only field, which has this number.
func content(number uint64, message []byte) ([]byte, error) {
	tag, n := binary.Uvarint(message)
	if n <= 0 || tag != number<<3|2 {
		return nil, errors.New("another message was expected")
	}
	length, m := binary.Uvarint(message[n:])
	if m <= 0 || length != uint64(len(message)-n-m) {
		return nil, errors.New("another length was expected")
	}
	return message[n+m:], nil
}

func attest(request []byte) ([]byte, error) {
	given, err := content(2, request)
	if err != nil {
		return nil, err
	}
	conn, err := net.Dial("tcp", *evidence)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if _, err := conn.Write(given); err != nil {
		return nil, err
	}
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		return nil, err
	}
	document, err := io.ReadAll(conn)
	return field(1, document), err
}

func ask() error {
	given, err := hex.DecodeString(*nonce)
	if err != nil {
		return err
	}
	conn, err := grpc.Dial(*attestation, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{})))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	request, response := field(2, given), []byte(nil)
	if len(given) == 0 {
		request = nil
	}
	if err := conn.Invoke(ctx, getAttestation, &request, &response); err != nil {
		fmt.Println("error", status.Code(err), status.Convert(err).Message())
		return nil
	}
	document, err := content(1, response)
	if err == nil {
		_, err = os.Stdout.Write(document)
	}
	return err
}

type raw struct{}

func (raw) Name() string { return "proto" }

func (raw) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

func (raw) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}

func serve(_ any, stream grpc.ServerStream) error {
	var message []byte
	if err := stream.RecvMsg(&message); err != nil {
		return err
	}
	method, _ := grpc.MethodFromServerStream(stream)
	if method == getAttestation && *evidence != "" {
		response, err := attest(message)
		if err != nil {
			return err
		}
		return stream.SendMsg(&response)
	}
	if strings.HasSuffix(method, "Echo") {
		return stream.SendMsg(&message)
	}
	<-stream.Context().Done()
	return status.FromContextError(stream.Context().Err()).Err()
}

func main() {
	flag.Parse()
	if *attestation != "" {
		if err := ask(); err != nil {
			log.Fatal(err)
		}
		return
	}
	options := []grpc.ServerOption{
		grpc.ForceServerCodec(raw{}),
		grpc.UnknownServiceHandler(serve),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: *age, MaxConnectionAgeGrace: 10 * time.Second}),
	}
	if *headers > 0 {
		options = append(options, grpc.MaxHeaderListSize(uint32(*headers)))
	}
	if *streams > 0 {
		options = append(options, grpc.MaxConcurrentStreams(uint32(*streams)))
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("listening", listener.Addr())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	log.Fatal(grpc.NewServer(options...).Serve(listener))
}
