package alloc

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

func sub(cidr string, ranges ...ipamv1.AddressRange) ipamv1.Subnet {
	return ipamv1.Subnet{CIDR: cidr, Ranges: ranges}
}

func TestCompileRefuses(t *testing.T) {
	with := func(s ipamv1.Subnet, f func(*ipamv1.Subnet)) ipamv1.Subnet { f(&s); return s }
	tests := map[string]struct {
		spec ipamv1.CapstanIPPoolSpec
		want string
	}{
		"nothing":             {ipamv1.CapstanIPPoolSpec{}, "expected at least one subnet"},
		"no CIDR":             {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0")}}, "expected a CIDR"},
		"host bits":           {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.1/24")}}, `write "10.0.0.0/24"`},
		"everything":          {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("0.0.0.0/0")}}, "must not be /0"},
		"v4 in v6":            {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("::ffff:10.0.0.0/120")}}, "written as IPv6"},
		"mixed subnets":       {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/24"), sub("fd00::/64")}}, "mix IPv4 and IPv6"},
		"overlapping subnets": {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/24"), sub("10.0.0.128/25")}}, "overlaps subnet 10.0.0.0/24"},
		"reversed range":      {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/24", "10.0.0.9-10.0.0.1")}}, `is reversed: its first address is above its last; write "10.0.0.1-10.0.0.9"`},
		"mixed range":         {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/24", "10.0.0.9-fd00::1")}}, "mixes IPv4 and IPv6"},
		"no range":            {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/24", "ten")}}, "expected a range"},
		"range outside":       {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/24", "10.0.1.1-10.0.1.9")}}, "must be inside 10.0.0.0/24"},
		"range family":        {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/24", "fd00::1")}}, "another address family"},
		"duplicate range":     {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/24", "10.0.0.1-10.0.0.9", "10.0.0.1-10.0.0.9")}}, "overlaps or repeats"},
		"overlapping ranges":  {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/24", "10.0.0.1-10.0.0.9", "10.0.0.8/30")}}, "overlaps or repeats"},
		"zone":                {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("fe80::/64", "fe80::1%eth0-fe80::2%eth0")}}, "without a zone"},
		"gateway outside": {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{with(sub("10.0.0.0/24"), func(s *ipamv1.Subnet) { s.Gateway = "10.0.1.1" })}},
			"gateway must be inside 10.0.0.0/24"},
		"exclude outside": {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{with(sub("10.0.0.0/24"), func(s *ipamv1.Subnet) { s.Exclude = []ipamv1.AddressRange{"10.0.1.1"} })}},
			"must be inside 10.0.0.0/24"},
		"nothing left": {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{with(sub("10.0.0.0/24"), func(s *ipamv1.Subnet) { s.Exclude = []ipamv1.AddressRange{"10.0.0.0/24"} })}},
			"no address to allocate"},
		"block too large": {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/24")}, PrefixLength: ptr.To[int32](20)}, "is larger than subnet"},
		"block too long":  {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/24")}, PrefixLength: ptr.To[int32](64)}, "expected 1 to 32 bits"},
		"reservation outside": {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/24", "10.0.0.1-10.0.0.9")}, Reservations: []ipamv1.Reservation{{Address: "10.0.0.20", Claim: "a"}}},
			"is not in the pool"},
		"reservation family": {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/24")}, Reservations: []ipamv1.Reservation{{Address: "fd00::1", Claim: "a"}}},
			"another address family than the pool"},
		"one address reserved twice": {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/24")}, Reservations: []ipamv1.Reservation{{Address: "10.0.0.2", Claim: "a"}, {Address: "10.0.0.2", Claim: "b"}}},
			"already reserved for claim"},
		"two reservations for one claim": {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/24")}, Reservations: []ipamv1.Reservation{{Address: "10.0.0.2", Claim: "a"}, {Address: "10.0.0.3", Claim: "a"}}},
			"already has 10.0.0.2 reserved"},
		"unaligned reservation": {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/24")}, PrefixLength: ptr.To[int32](28), Reservations: []ipamv1.Reservation{{Address: "10.0.0.2", Claim: "a"}}},
			"is not the first address"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, errs := Compile(&tt.spec, field.NewPath("spec"))
			if len(errs) == 0 || !strings.Contains(errs.ToAggregate().Error(), tt.want) {
				t.Errorf("want an error with %q, got %v", tt.want, errs)
			}
		})
	}
}

func TestCompileContents(t *testing.T) {
	gw := func(s ipamv1.Subnet, gateway string, allow ...ipamv1.ReservedAddress) ipamv1.Subnet {
		s.Gateway, s.AllocateReserved = gateway, allow
		return s
	}
	tests := map[string]struct {
		spec  ipamv1.CapstanIPPoolSpec
		total string
		pool  string
	}{
		"whole subnet":     {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/29")}}, "6", "10.0.0.1-10.0.0.6"},
		"gateway":          {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{gw(sub("10.0.0.0/29"), "10.0.0.3")}}, "5", "10.0.0.1-10.0.0.2 10.0.0.4-10.0.0.6"},
		"gateway allowed":  {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{gw(sub("10.0.0.0/29"), "10.0.0.3", "Gateway")}}, "6", "10.0.0.1-10.0.0.6"},
		"network allowed":  {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{gw(sub("10.0.0.0/29"), "", "Network")}}, "7", "10.0.0.0-10.0.0.6"},
		"all allowed":      {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{gw(sub("10.0.0.0/29"), "", "Network", "Broadcast")}}, "8", "10.0.0.0-10.0.0.7"},
		"point to point":   {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/31")}}, "2", "10.0.0.0-10.0.0.1"},
		"host":             {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.7/32")}}, "1", "10.0.0.7-10.0.0.7"},
		"anycast":          {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("fd00::/64")}}, "18446744073709551615", "fd00::1-fd00::ffff:ffff:ffff:ffff"},
		"anycast allowed":  {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{gw(sub("fd00::/126"), "", "Anycast")}}, "4", "fd00::-fd00::3"},
		"huge":             {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{gw(sub("8000::/1"), "", "Anycast")}}, "170141183460469231731687303715884105728", "8000::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"},
		"prefixes":         {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("10.0.0.0/24")}, PrefixLength: ptr.To[int32](26)}, "4", "10.0.0.0-10.0.0.255"},
		"prefixes gateway": {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{gw(sub("10.0.0.0/24"), "10.0.0.1")}, PrefixLength: ptr.To[int32](26)}, "3", "10.0.0.64-10.0.0.255"},
		"v6 prefixes":      {ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{sub("fd00::/48")}, PrefixLength: ptr.To[int32](64)}, "65536", "fd00::-fd00::ffff:ffff:ffff:ffff:ffff"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			plan, errs := Compile(&tt.spec, field.NewPath("spec"))
			if len(errs) > 0 {
				t.Fatal(errs.ToAggregate())
			}
			var parts []string
			for _, r := range plan.Pool {
				parts = append(parts, fmt.Sprintf("%s-%s", plan.Addr(r.First), plan.Addr(r.Last)))
			}
			if got := strings.Join(parts, " "); got != tt.pool || plan.Total().String() != tt.total {
				t.Errorf("got %s of %s, want %s of %s", plan.Total(), got, tt.total, tt.pool)
			}
		})
	}
}

// Each subnet has its own prefix and gateway.
func TestPlace(t *testing.T) {
	plan, errs := Compile(&ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{
		{CIDR: "10.0.1.0/24", Gateway: "10.0.1.254"}, {CIDR: "10.0.0.0/25", Gateway: "10.0.0.1"},
	}}, field.NewPath("spec"))
	if len(errs) > 0 {
		t.Fatal(errs.ToAggregate())
	}
	for ask, want := range map[string]Placement{"10.0.0.9": {25, "10.0.0.1"}, "10.0.1.9": {24, "10.0.1.254"}} {
		a, err := plan.Ask(ask)
		if err != nil || plan.Place(a) != want {
			t.Errorf("%s: got %+v, %v, want %+v", ask, plan.Place(a), err, want)
		}
	}
	if _, err := plan.Ask("10.0.0.1"); err == nil {
		t.Error("a claim can request the gateway")
	}
}
