// Shamir's scheme as HashiCorp Vault has it. All bytes are hexadecimal, one value a line.
//
//	shamir split THRESHOLD SHARES    reads a secret, prints shares
//	shamir combine                   reads shares, prints the secret
package main

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"os"
	"strconv"

	"github.com/hashicorp/vault/shamir"
)

func main() {
	var values [][]byte
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		value, err := hex.DecodeString(lines.Text())
		check(err)
		values = append(values, value)
	}
	switch os.Args[1] {
	case "split":
		threshold, err := strconv.Atoi(os.Args[2])
		check(err)
		count, err := strconv.Atoi(os.Args[3])
		check(err)
		shares, err := shamir.Split(values[0], count, threshold)
		check(err)
		for _, share := range shares {
			fmt.Println(hex.EncodeToString(share))
		}
	case "combine":
		secret, err := shamir.Combine(values)
		check(err)
		fmt.Println(hex.EncodeToString(secret))
	}
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
