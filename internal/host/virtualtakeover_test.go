package host

import (
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/boottime"
	"capstan.dev/capstan/internal/host/balancer"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

// If capstand hangs, the kernel removes the address before the term ends. The kernel counts whole seconds, so the lifetime is rounded
// down.
func TestLifetimeOfVirtualAddress(t *testing.T) {
	const now = time.Hour
	ms := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
	for name, tc := range map[string]struct {
		until, expires, want time.Duration
		ended                bool
	}{
		"a whole term":                           {now + ms(3000), 0, ms(3000), false},
		"rounded down":                           {now + ms(2500), 0, ms(2000), false},
		"the last part of a term is not started": {now + ms(999), 0, 0, false},
		"a renewed term":                         {now + ms(2500), now + ms(1200), ms(2000), false},
		"the kernel keeps it long enough":        {now + ms(1900), now + ms(1600), 0, false},
		"a later tick gains a part of a second":  {now + ms(2000), now + ms(1900), ms(2000), false},
		"the kernel has removed it":              {now + ms(2500), now - ms(1), ms(2000), true},
		"the kernel removes it now":              {now + ms(300), now, 0, true},
		"the term has ended":                     {now, 0, 0, true},
		"the term was shortened":                 {now - ms(1), now + ms(1000), 0, true},
		"no machine has reported a term":         {0, 0, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			life := lifetime(now, tc.until, tc.expires)
			if got := ended(now, tc.until, tc.expires); life != tc.want || got != tc.ended {
				t.Errorf("lifetime %s and ended %v, want %s and %v", life, got, tc.want, tc.ended)
			}
			if now+life > max(tc.until, now) {
				t.Errorf("the address outlives the term by %s", now+life-tc.until)
			}
		})
	}
}

// elected is a host with a healthy load balancer and one control plane machine, which reports terms.
type elected struct {
	*testing.T
	*virtualAddress
	dir string
}

// stepsUntil repeats steps until a condition holds. The machine has the rest of a term at each step.
func (e *elected) stepsUntil(what string, rest time.Duration, holds func(*hostpb.LoadBalancer) bool) {
	e.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(virtualPause / 10) {
		data, err := json.Marshal(machineapi.EndpointTerm{Until: boottime.Now() + rest})
		if err == nil {
			err = os.WriteFile(filepath.Join(e.dir, machineapi.EndpointLeaseFile), data, 0o600)
		}
		if err != nil {
			e.Fatal(err)
		}
		e.step(e.Context(), []string{e.dir}, nil)
		if found := e.lb.snapshot(); holds(found) {
			return
		} else if time.Now().After(end) {
			e.Fatalf("%s: found %v", what, found)
		}
	}
}

func held(lb *hostpb.LoadBalancer) bool    { return lb.VirtualAddress.Held }
func notHeld(lb *hostpb.LoadBalancer) bool { return !lb.VirtualAddress.Held }

// A host probes the address before each take-over, not only before the first one: a station that took the address meanwhile keeps
// it, and its MAC address is reported.
func TestProbeBeforeEachTakeOver(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	for family, own := range map[string]netip.Prefix{"IPv4": netip.MustParsePrefix("203.0.113.1/24"), "IPv6": netip.MustParsePrefix("2001:db8:5::1/64")} {
		t.Run(family, func(t *testing.T) {
			address := own.Addr().Next()
			station, mac := newStation(t, own)
			lb := &loadBalancer{
				host: &balancers{platform: &platform{broadcaster: events.New()}}, log: slog.New(slog.DiscardHandler),
				spec:   &hostpb.LoadBalancer{VirtualAddress: &hostpb.VirtualAddress{Address: address.String()}},
				status: balancer.Status{Listening: []string{"10.231.7.1:6443"}, Healthy: []string{"10.231.7.10:6443"}},
			}
			e := &elected{t, &virtualAddress{lb: lb, address: address}, t.TempDir()}
			const term = 2500 * time.Millisecond
			e.stepsUntil("the first take-over of a free address", term, held)
			e.stepsUntil("the end of the term", 0, notHeld)

			plug := func(change func(netlink.Link, *netlink.Addr) error) {
				t.Helper()
				if err := testnetns.In(station, func() error {
					link, err := netlink.LinkByName("lan")
					if err != nil {
						return err
					}
					ip := &net.IPNet{IP: address.AsSlice(), Mask: net.CIDRMask(address.BitLen(), address.BitLen())}
					return change(link, &netlink.Addr{IPNet: ip, Flags: unix.IFA_F_NODAD})
				}); err != nil {
					t.Fatal(err)
				}
			}
			plug(netlink.AddrAdd)
			e.stepsUntil("the next take-over, while a station has the address", term, func(lb *hostpb.LoadBalancer) bool {
				if held(lb) {
					t.Fatalf("two stations have %s", address)
				}
				return strings.Contains(lb.Message, mac)
			})
			plug(netlink.AddrDel)
			e.stepsUntil("the next take-over, after the station gave up the address", term, held)
			e.stepsUntil("the end of the message", term, func(lb *hostpb.LoadBalancer) bool { return lb.Message == "" })
		})
	}
}

// newStation connects this host, with an address, to a station, and returns the station's namespace and MAC address.
func newStation(t *testing.T, own netip.Prefix) (station netns.NsHandle, mac string) {
	t.Helper()
	station, err := testnetns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = station.Close() })
	here, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	name := "lan" + strconv.Itoa(own.Addr().BitLen())
	if err := testnetns.Cable(testnetns.End{NS: here, Name: name}, testnetns.End{NS: station, Name: "lan"}); err != nil {
		t.Fatal(err)
	}
	if err := testnetns.In(station, func() error {
		link, err := netlink.LinkByName("lan")
		if err != nil {
			return err
		}
		mac = link.Attrs().HardwareAddr.String()
		return netlink.LinkSetUp(link)
	}); err != nil {
		t.Fatal(err)
	}
	link, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	ip := &net.IPNet{IP: own.Addr().AsSlice(), Mask: net.CIDRMask(own.Bits(), own.Addr().BitLen())}
	if err := errors.Join(netlink.AddrAdd(link, &netlink.Addr{IPNet: ip, Flags: unix.IFA_F_NODAD}), netlink.LinkSetUp(link)); err != nil {
		t.Fatal(err)
	}
	return station, mac
}
