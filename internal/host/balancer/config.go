// Package balancer is the load balancer of a cluster's control plane endpoint. It is a separate, unprivileged process that
// continues while capstand is down. It forwards TCP connections in turn to the backends whose API server answers /readyz.
//
// While no backend is healthy, the balancer accepts connections and holds them for a while instead of refusing them. After a
// refused connection, Cluster API core waits 30 s before its next attempt; a new control plane is ready within a few
// seconds.
//
// capstand and the balancer exchange two files in one folder. Each file is replaced as a whole and watched with inotify:
// capstand writes ConfigFile, the balancer writes StatusFile.
//
// Layer: host. Allowed imports: api, library, contract.
package balancer

import (
	"net"
	"time"

	"capstan.dev/capstan/internal/host/proc"
)

const (
	// ConfigFile contains a Config.
	ConfigFile = "config.json"
	// StatusFile contains a Status.
	StatusFile = "status.json"
)

// Config is the configuration of a balancer.
type Config struct {
	// Listen addresses, host:port.
	Listen []string `json:"listen"`
	// Roaming is the virtual address among the listen addresses: the host does not have it while another host has it. It can be empty.
	Roaming  string    `json:"roaming,omitempty"`
	Backends []Backend `json:"backends"`
}

// Backend is an API server.
type Backend struct {
	Name string `json:"name"`
	// Address is host:port.
	Address string `json:"address"`
}

// Status is the state of a balancer.
type Status struct {
	// Process of the balancer.
	Process proc.Ref `json:"process"`
	// Listening lists the addresses that are open.
	Listening []string `json:"listening"`
	// Healthy lists the addresses of the healthy backends.
	Healthy []string `json:"healthy"`
	// Message describes a problem, for example an address that is in use.
	Message string `json:"message,omitempty"`
}

// Timing of the balancer. Tests use shorter times.
type Timing struct {
	// FirstChecks is the time between checks of a backend that was never healthy, so that a new control plane is found soon.
	FirstChecks time.Duration
	// AnsweredChecks is the time between checks of a backend that was never healthy and answers that it is not ready yet: an API server
	// is ready a moment after its first answer.
	AnsweredChecks time.Duration
	// Checks is the time between checks of a backend that was healthy before.
	Checks time.Duration
	// CheckTimeout bounds one check.
	CheckTimeout time.Duration
	// Park is the longest time that a connection waits for a healthy backend.
	Park time.Duration
	// Dial bounds one attempt to connect to a backend.
	Dial time.Duration
	// Hello is the longest time until a client begins its TLS handshake.
	Hello time.Duration
	// Drain is the longest time that a balancer keeps its connections after another one has taken over.
	Drain time.Duration
	// CutOff is the time after which the balancer ends the connections to a backend whose kernel answers no attempt to connect.
	CutOff time.Duration
}

// DefaultTiming is the timing in production.
var DefaultTiming = Timing{
	FirstChecks:    250 * time.Millisecond,
	AnsweredChecks: 100 * time.Millisecond,
	Checks:         time.Second,
	CheckTimeout:   5 * time.Second,
	Park:           30 * time.Second,
	Dial:           2 * time.Second,
	Hello:          10 * time.Second,
	Drain:          15 * time.Minute,
	CutOff:         10 * time.Second,
}

// keepAlive sends probes, which detect a vanished peer after a minute. An idle connection, such as a watch, stays as long as the client's
// kernel answers. If data waits for a vanished client, the kernel gives up after about 15 minutes instead (tcp_retries2). There
// is no TCP_USER_TIMEOUT: it also ends connections whose peer answers, but reads nothing for a while.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 10 * time.Second, Count: 3}

// failures is the number of consecutive failed checks, other than refused connections, after which a backend is unhealthy.
// An API server under load may miss one check.
const failures = 2
