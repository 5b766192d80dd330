module firstlight.test/shamir

go 1.19

require github.com/hashicorp/vault v1.12.11
