package integration

import (
	"fmt"
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/testenv/expect"
)

// withoutWebhooks runs f while the provider's admission is disabled.
func withoutWebhooks(t *testing.T, f func()) {
	t.Helper()
	list := &admissionregistrationv1.ValidatingWebhookConfigurationList{}
	expect.NoError(t, env.Client.List(ctx, list))
	for i := range list.Items {
		expect.NoError(t, env.Client.Delete(ctx, &list.Items[i]))
	}
	probe := newPool("default", "probe", subnet("10.0.0.0/24", "10.0.0.9-10.0.0.1"))
	defer func() { // also when f fails, because other tests need it
		for i := range list.Items {
			list.Items[i].ResourceVersion = ""
			create(t, &list.Items[i])
		}
		expect.Eventually(t, "admission to be enabled", func() error {
			if err := env.Client.Create(ctx, probe.DeepCopy(), client.DryRunAll); !apierrors.IsInvalid(err) {
				return fmt.Errorf("got %w", err)
			}
			return nil
		})
	}()
	expect.Eventually(t, "admission to be disabled", func() error { return env.Client.Create(ctx, probe.DeepCopy(), client.DryRunAll) })
	f()
}

// Admission refuses invalid input with a clear error, from the schema's rules or from the webhook.
func TestRefusals(t *testing.T) {
	many := func(n int) []string {
		out := make([]string, n)
		for i := range out {
			out[i] = fmt.Sprintf("10.%d.%d.%d", i>>16&255, i>>8&255, i&255)
		}
		return out
	}
	spec := func(change func(*ipamv1.CapstanIPPoolSpec), subnets ...ipamv1.Subnet) ipamv1.CapstanIPPoolSpec {
		s := ipamv1.CapstanIPPoolSpec{Subnets: subnets}
		if change != nil {
			change(&s)
		}
		return s
	}
	tests := map[string]struct {
		spec ipamv1.CapstanIPPoolSpec
		want string
	}{
		"no subnets":          {spec(nil), "spec: Required value"},
		"no CIDR":             {spec(nil, subnet("not a cidr")), "must be a CIDR"},
		"reversed range":      {spec(nil, subnet("10.0.0.0/24", "10.0.0.9-10.0.0.1")), "is reversed"},
		"mixed families":      {spec(nil, subnet("10.0.0.0/24"), subnet("fd00::/64")), "one address family"},
		"gateway outside":     {spec(func(s *ipamv1.CapstanIPPoolSpec) { s.Subnets[0].Gateway = "10.0.1.1" }, subnet("10.0.0.0/24")), "gateway must be an address inside cidr"},
		"gateway no address":  {spec(func(s *ipamv1.CapstanIPPoolSpec) { s.Subnets[0].Gateway = "router" }, subnet("10.0.0.0/24")), "must be an IP address"},
		"host bits":           {spec(nil, subnet("10.0.0.1/24")), "host bits set"},
		"everything":          {spec(nil, subnet("0.0.0.0/0")), "must not be /0"},
		"duplicate ranges":    {spec(nil, subnet("10.0.0.0/24", "10.0.0.5", "10.0.0.5")), "overlaps or repeats"},
		"overlapping ranges":  {spec(nil, subnet("10.0.0.0/24", "10.0.0.1-10.0.0.9", "10.0.0.9-10.0.0.12")), "overlaps or repeats"},
		"overlapping subnets": {spec(nil, subnet("10.0.0.0/24"), subnet("10.0.0.0/25")), "overlaps subnet"},
		"range outside":       {spec(nil, subnet("10.0.0.0/24", "10.0.1.5")), "must be inside 10.0.0.0/24"},
		"reservation outside": {spec(func(s *ipamv1.CapstanIPPoolSpec) {
			s.Reservations = []ipamv1.Reservation{{Address: "10.0.1.1", Claim: "a"}}
		}, subnet("10.0.0.0/24")), "is not in the pool"},
		"namespaced reservation": {spec(func(s *ipamv1.CapstanIPPoolSpec) {
			s.Reservations = []ipamv1.Reservation{{Address: "10.0.0.2", Claim: "a", Namespace: "b"}}
		}, subnet("10.0.0.0/24")), "own namespace only"},
		"a million ranges": {spec(nil, subnet("10.0.0.0/8", many(100_000)...)), "at most 256"},
		"prefix too large": {spec(func(s *ipamv1.CapstanIPPoolSpec) { s.PrefixLength = ptr.To[int32](20) }, subnet("10.0.0.0/24")), "prefixLength must be at least"},
		"prefix too long":  {spec(func(s *ipamv1.CapstanIPPoolSpec) { s.PrefixLength = ptr.To[int32](33) }, subnet("10.0.0.0/24")), "at most 32"},
		"negative rest":    {spec(func(s *ipamv1.CapstanIPPoolSpec) { s.RestSeconds = ptr.To[int32](-1) }, subnet("10.0.0.0/24")), "restSeconds"},
		"unknown order":    {spec(func(s *ipamv1.CapstanIPPoolSpec) { s.Order = "Highest" }, subnet("10.0.0.0/24")), "Unsupported value"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			p := newPool("default", "bad")
			p.Spec = tt.spec
			err := env.Client.Create(ctx, p, client.DryRunAll)
			if !apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("want an error with %q, got %v", tt.want, err)
			}
		})
	}
	ns := env.Namespace(t)
	p := newPool(ns, "prefixes", subnet("10.0.0.0/24"))
	p.Spec.PrefixLength = ptr.To[int32](28)
	create(t, p)
	p.Spec.PrefixLength = nil
	if err := env.Client.Update(ctx, p); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "immutable") {
		t.Errorf("prefixLength was changed: %v", err)
	}
}

// A list of the maximum length is accepted. One more entry is refused. The test covers both kinds of pools. No other
// test uses addresses in 198.18.0.0/15: the provider would refuse a pool that overlaps another one.
func TestLimitsOfLists(t *testing.T) {
	type spec = ipamv1.CapstanIPPoolSpec
	address := func(i int) string { return fmt.Sprintf("198.18.%d.%d", (i+1)/256, (i+1)%256) }
	ranges := func(n int) (out []ipamv1.AddressRange) {
		for i := range n {
			out = append(out, ipamv1.AddressRange(address(i)))
		}
		return out
	}
	for field, c := range map[string]struct {
		limit int
		fill  func(s *spec, n int)
	}{
		"spec.subnets": {64, func(s *spec, n int) {
			for i := 1; i < n; i++ {
				s.Subnets = append(s.Subnets, subnet(fmt.Sprintf("198.19.%d.0/24", i)))
			}
		}},
		"spec.subnets[0].ranges":  {256, func(s *spec, n int) { s.Subnets[0].Ranges = ranges(n) }},
		"spec.subnets[0].exclude": {256, func(s *spec, n int) { s.Subnets[0].Exclude = ranges(n) }},
		"spec.reservations": {1024, func(s *spec, n int) {
			for i := range n {
				s.Reservations = append(s.Reservations, ipamv1.Reservation{Address: address(i), Claim: fmt.Sprint("claim-", i)})
			}
		}},
	} {
		try := func(global bool, n int) error {
			s := spec{Subnets: []ipamv1.Subnet{subnet("198.18.0.0/16")}}
			c.fill(&s, n)
			var p client.Object
			if global {
				p = &ipamv1.GlobalCapstanIPPool{Spec: ipamv1.GlobalCapstanIPPoolSpec{CapstanIPPoolSpec: s}}
			} else {
				p = &ipamv1.CapstanIPPool{Spec: s}
				p.SetNamespace("default")
			}
			p.SetName("long")
			return env.Client.Create(ctx, p, client.DryRunAll)
		}
		for _, global := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, global %t", field, global), func(t *testing.T) {
				if err := try(global, c.limit); err != nil {
					t.Errorf("%d entries: %v", c.limit, err)
				}
				want := fmt.Sprintf("%s: Too many: %d: must have at most %d items", field, c.limit+1, c.limit)
				if err := try(global, c.limit+1); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), want) {
					t.Errorf("want an error with %q, got %v", want, err)
				}
			})
		}
	}
}
