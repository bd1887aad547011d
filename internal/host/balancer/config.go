// Package balancer is the load balancer of a cluster's control plane endpoint: a process of its own,
// unprivileged, that goes on when capstand does not. It forwards TCP connections in turn to backends
// whose API server answers /readyz.
//
// While no backend is healthy it accepts connections and keeps them for a while instead of refusing
// them. Cluster API core, once refused, tries again only after 30 s; a new control plane is there
// within a few seconds.
//
// capstand and the balancer talk through two files in one folder, each replaced as a whole and
// watched with inotify: capstand writes ConfigFile, the balancer StatusFile.
//
// Layer: host.
package balancer

import (
	"net"
	"time"

	"capstan.dev/capstan/internal/host/proc"
)

const (
	// ConfigFile holds a Config.
	ConfigFile = "config.json"
	// StatusFile holds a Status.
	StatusFile = "status.json"
)

// Config is what the balancer is to do.
type Config struct {
	// Listen addresses, host:port.
	Listen   []string  `json:"listen"`
	Backends []Backend `json:"backends"`
}

// Backend is an API server.
type Backend struct {
	Name string `json:"name"`
	// Address is host:port.
	Address string `json:"address"`
}

// Status is what the balancer does.
type Status struct {
	// Process is the balancer's own.
	Process proc.Ref `json:"process"`
	// Listening lists the addresses that are served.
	Listening []string `json:"listening"`
	// Healthy lists the addresses of the backends that answer.
	Healthy []string `json:"healthy"`
	// Message says what is wrong, for example that an address is taken.
	Message string `json:"message,omitempty"`
}

// Timing of the balancer. Tests make it faster.
type Timing struct {
	// FirstChecks is the time between checks of a backend that was never healthy: a new control plane
	// is to be noticed at once.
	FirstChecks time.Duration
	// Checks is the time between checks later on.
	Checks time.Duration
	// CheckTimeout ends a check.
	CheckTimeout time.Duration
	// Park is for how long a connection waits for a healthy backend.
	Park time.Duration
	// Dial ends an attempt to connect to a backend.
	Dial time.Duration
	// Hello is how long a client may take to begin its TLS handshake.
	Hello time.Duration
	// Drain is how long the connections of a balancer go on that another one has followed.
	Drain time.Duration
	// Unanswered ends a connection whose backend's kernel has not acknowledged what was sent for so long. The backend
	// is on this host: a busy API server does not delay its kernel.
	Unanswered time.Duration
}

// DefaultTiming is what the balancer uses.
var DefaultTiming = Timing{
	FirstChecks:  250 * time.Millisecond,
	Checks:       time.Second,
	CheckTimeout: 5 * time.Second,
	Park:         30 * time.Second,
	Dial:         2 * time.Second,
	Hello:        10 * time.Second,
	Drain:        15 * time.Minute,
	Unanswered:   10 * time.Second,
}

// Peers that are gone without a word are noticed after a minute; a connection that is only silent, such as a watch,
// stays as long as its client answers the kernel.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 10 * time.Second, Count: 3}

const userTimeout = time.Minute

// failures in a row, other than a refused connection, make a backend unhealthy. An API server under
// load may miss one check.
const failures = 2
