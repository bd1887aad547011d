//go:build e2e

package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/internal/host/balancer"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
)

// errNoVictim means that the target's class has no victim at the moment.
var errNoVictim = errors.New("no victim")

// victim is the object of a fault. Its process comes from the state of capstan and capstand.
type victim struct {
	name string
	pid  int    // of processes
	id   string // of machines and networks
}

// choose returns the victim of a fault.
func choose(all []victim, pick int) (victim, error) {
	if len(all) == 0 {
		return victim{}, errNoVictim
	}
	all = slices.SortedFunc(slices.Values(all), func(a, b victim) int { return cmp.Or(strings.Compare(a.name, b.name), a.pid-b.pid) })
	return all[pick%len(all)], nil
}

const (
	// killsOfMachine is smaller than the number of deaths within killWindow after which capstand gives a machine up.
	killsOfMachine = 4
	killWindow     = 10 * time.Minute
)

// mayKill reports whether a machine with these times of death may be killed again.
func mayKill(deaths []time.Time, now time.Time) bool {
	recent := 0
	for _, d := range deaths {
		if now.Sub(d) < killWindow {
			recent++
		}
	}
	return recent < killsOfMachine
}

// inject injects a fault and returns the name of its victim. A goroutine of s.undoing reverts the fault if necessary.
func (s *soak) inject(ctx context.Context, f fault) (string, error) {
	v, err := s.victim(ctx, f)
	if err != nil {
		return "", err
	}
	switch f.Kind {
	case killFault, stopFault:
		err = s.signal(ctx, f, v)
	case cutFault:
		err = s.cut(ctx, f, v)
	case wipeFault:
		err = wipe(ctx, f, v)
	}
	return v.name, err
}

func (s *soak) victim(ctx context.Context, f fault) (victim, error) {
	all, err := s.victims(ctx, f)
	if err != nil {
		return victim{}, err
	}
	return choose(all, f.Pick)
}

func (s *soak) victims(ctx context.Context, f fault) ([]victim, error) {
	switch f.Target {
	case targetMachine, targetService, targetLink:
		return s.victimsOfMachines(ctx, f)
	case targetBalancer:
		return s.balancers()
	case targetRules:
		var out []victim
		for id, name := range s.seenNetworks() {
			if s.alive(name) {
				out = append(out, victim{name: name, id: id})
			}
		}
		return out, nil
	}
	ctx, cancel := context.WithTimeout(ctx, stateTimeout)
	defer cancel()
	status, err := embedded.GetStatus(ctx, s.layout)
	if err != nil {
		return nil, err
	}
	if f.Target == targetDaemon {
		return []victim{{name: string(targetDaemon), pid: status.PID}}, nil
	}
	for _, c := range status.Components {
		if c.Name == string(f.Target) && c.PID > 0 {
			return []victim{{name: c.Name, pid: c.PID}}, nil
		}
	}
	return nil, nil
}

func (s *soak) victimsOfMachines(ctx context.Context, f fault) (out []victim, err error) {
	machines, err := s.capstandMachines(ctx)
	if err != nil {
		return nil, err
	}
	for _, m := range machines {
		if m.Status.Phase != hostpb.MachineStatus_RUNNING || m.Status.Pid == 0 {
			continue
		}
		if f.Target == targetService {
			services, err := servicesOf(m)
			if err != nil {
				return nil, err
			}
			out = append(out, services...)
			continue
		}
		if f.Kind == killFault && !mayKill(s.deathsOf(m.Spec.Id), time.Now()) {
			continue
		}
		out = append(out, victim{name: m.Spec.Name, pid: int(m.Status.Pid), id: m.Spec.Id})
	}
	return out, nil
}

// servicesOf finds the processes of a machine's services. capstand reports their ids in the machine's namespace.
func servicesOf(m *hostpb.Machine) (out []victim, err error) {
	inside := map[int]string{}
	for _, service := range m.Status.Services {
		if service.Pid > 0 {
			inside[int(service.Pid)] = service.Name
		}
	}
	space, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", m.Status.Pid))
	if err != nil {
		return nil, nil // The machine has ended, so it has no services.
	}
	all, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	for _, dir := range all {
		if other, err := os.Readlink(dir + "/ns/pid"); err != nil || other != space {
			continue
		}
		name, ok := inside[innerPID(dir+"/status")]
		if pid, err := strconv.Atoi(filepath.Base(dir)); ok && err == nil {
			out = append(out, victim{name: name + " of " + m.Spec.Name, pid: pid, id: m.Spec.Id})
		}
	}
	return out, nil
}

// innerPID returns the id of a process in its own namespace, or 0 if it has ended.
func innerPID(status string) int {
	f, err := os.Open(status)
	if err != nil {
		return 0
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); len(fields) > 1 && fields[0] == "NSpid:" {
			pid, _ := strconv.Atoi(fields[len(fields)-1])
			return pid
		}
	}
	return 0
}

func (s *soak) balancers() (out []victim, err error) {
	files, err := filepath.Glob(filepath.Join(s.hostRoot(), "balancers", "*", "shared", balancer.StatusFile))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		var status balancer.Status
		if err := atomicfile.ReadJSON(file, &status); err == nil && status.Process.Alive() {
			out = append(out, victim{name: "balancer " + filepath.Base(filepath.Dir(filepath.Dir(file))), pid: status.Process.PID})
		}
	}
	return out, nil
}

// signal sends SIGKILL, or SIGSTOP and later SIGCONT. It opens a descriptor of the process and checks the process again.
// The signal therefore cannot reach another process with the same id.
func (s *soak) signal(ctx context.Context, f fault, v victim) error {
	fd, err := unix.PidfdOpen(v.pid, 0)
	if err != nil {
		return fmt.Errorf("%w: %s has ended", errNoVictim, v.name)
	}
	if again, err := s.victim(ctx, f); err != nil || again != v {
		_ = unix.Close(fd)
		return fmt.Errorf("%w: %s is another process now", errNoVictim, v.name)
	}
	if f.Kind == stopFault {
		s.later(f.For, func(context.Context) error {
			defer func() { _ = unix.Close(fd) }()
			_ = unix.PidfdSendSignal(fd, unix.SIGCONT, nil, 0) // It may have been killed meanwhile.
			return nil
		})
		return unix.PidfdSendSignal(fd, unix.SIGSTOP, nil, 0)
	}
	defer func() { _ = unix.Close(fd) }()
	if f.Target == targetMachine {
		s.noteDeath(v.id, time.Now())
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil {
		return fmt.Errorf("%w: %s has ended", errNoVictim, v.name)
	}
	if f.Target == targetDaemon {
		s.later(0, func(ctx context.Context) error { return s.retry(ctx, "capstan up", s.up) })
	}
	return nil
}

// cutRules drops all packets that a machine and its pods send and receive.
const cutRules = `table inet %s {
	chain input { type filter hook input priority -400; iifname "eth0" drop; }
	chain output { type filter hook output priority -400; oifname "eth0" drop; }
	chain forward { type filter hook forward priority -400; iifname "eth0" drop; oifname "eth0" drop; }
}
`

// cut drops all packets of a machine, in the machine's own network namespace, until the time is over.
func (s *soak) cut(ctx context.Context, f fault, v victim) error {
	table := fmt.Sprintf("soak%d", time.Now().UnixNano()) // Two cuts of one machine may overlap.
	path := s.box().NetNS(v.id)
	if err := inNetNS(ctx, path, fmt.Sprintf(cutRules, table)); err != nil {
		return fmt.Errorf("%w: %w", errNoVictim, err)
	}
	s.later(f.For, func(ctx context.Context) error {
		err := inNetNS(ctx, path, "delete table inet "+table+"\n")
		if !atomicfile.Exists(path) {
			return nil // the machine was deleted
		}
		return err
	})
	return nil
}

func inNetNS(ctx context.Context, path, rules string) error {
	cmd := exec.CommandContext(ctx, "nsenter", "--net="+path, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(rules)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("nft in %s: %w: %s", path, err, out)
	}
	return nil
}

// wipe removes capstand's objects from the network of the host. It is not reverted: capstand repairs it.
func wipe(ctx context.Context, f fault, v victim) error {
	if f.Target == targetLink {
		link, err := netlink.LinkByName(network.VethName(v.id))
		if err != nil {
			return fmt.Errorf("%w: %w", errNoVictim, err)
		}
		return netlink.LinkDel(link)
	}
	if out, err := exec.CommandContext(ctx, "nft", "delete", "table", "inet", network.TableName(v.id)).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", errNoVictim, out)
	}
	return nil
}
