// A peer for the gRPC tests: grpc-go, with the options that the programs of the old system use.
//
//	grpc-go [flags]   prints "listening ADDRESS", serves until its standard input ends
//
// It answers each method whose name ends with Echo with the request. Other methods wait for the end
// of their call. Messages are bytes that it does not parse, so that it needs no generated code.
package main

import (
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

var (
	age     = flag.Duration("age", 0, "MaxConnectionAge; 0: none")
	headers = flag.Uint("headers", 0, "MaxHeaderListSize; 0: the default")
	streams = flag.Uint("streams", 0, "MaxConcurrentStreams; 0: the default")
)

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
	if strings.HasSuffix(method, "Echo") {
		return stream.SendMsg(&message)
	}
	<-stream.Context().Done()
	return status.FromContextError(stream.Context().Err()).Err()
}

func main() {
	flag.Parse()
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
