// Connects to HOST:PORT as kubectl does: with the dialler and the resolver of Go's standard library.
package main

import (
	"fmt"
	"net"
	"os"
	"time"
)

func main() {
	dialer := net.Dialer{Timeout: 30 * time.Second, Resolver: &net.Resolver{PreferGo: true}}
	connection, err := dialer.Dial("tcp", os.Args[1])
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	connection.Close()
}
