module firstlight.test/event-logs

go 1.19

require (
	github.com/google/go-eventlog v0.0.2
	github.com/google/go-tpm-tools v0.4.11
)
