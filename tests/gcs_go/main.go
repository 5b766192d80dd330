// Serves buckets of Google Cloud Storage with fake-gcs-server, which asks for no credentials: tests/key_wrapping/gcp_kms.py stands before
// it. The arguments are the names of buckets. Prints its address, and ends with its standard input.
package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"

	"github.com/fsouza/fake-gcs-server/fakestorage"
)

func main() {
	server, err := fakestorage.NewServerWithOptions(fakestorage.Options{NoListener: true})
	if err != nil {
		panic(err)
	}
	for _, bucket := range os.Args[1:] {
		server.CreateBucketWithOpts(fakestorage.CreateBucketOpts{Name: bucket})
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	fmt.Println(listener.Addr())
	go http.Serve(listener, server.HTTPHandler())
	io.Copy(io.Discard, os.Stdin)
}
