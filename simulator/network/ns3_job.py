"""What runs inside ns-3's own process: a job of :mod:`.packet` from standard input, arrivals to standard output.

The network is built and run in C++, compiled by cppyy when it starts; nothing of opcast is imported here.
"""

from __future__ import annotations

import json
import sys
from typing import Any

FRAME_BYTES = 9000
WINDOW_BYTES = 2_000_000

PROGRAM = """
#include <map>
#include <vector>
namespace opcast {
using namespace ns3;
struct Message { int source, target; uint64_t bytes, arrived; int waits; std::vector<int> followers; double end; };
std::vector<Message> messages;
std::vector<Ptr<Node>> nodes;
std::vector<Ipv4Address> addresses;
std::map<std::pair<int, int>, double> links;

void start(int i);
void received(int i, Ptr<const Packet> packet, const Address&) {
  Message& m = messages[i];
  m.arrived += packet->GetSize();
  if (m.arrived < m.bytes || m.end >= 0) return;
  m.end = Simulator::Now().GetNanoSeconds() / 1e3;
  for (int f : m.followers) if (--messages[f].waits == 0) start(f);
}
void start(int i) {
  Message& m = messages[i];
  Ptr<BulkSendApplication> app = CreateObject<BulkSendApplication>();
  app->SetAttribute("Protocol", TypeIdValue(TcpSocketFactory::GetTypeId()));
  app->SetAttribute("Remote", AddressValue(InetSocketAddress(addresses[m.target], 1000 + i)));
  app->SetAttribute("MaxBytes", UintegerValue(m.bytes));
  app->SetAttribute("SendSize", UintegerValue(FRAME - 52));
  nodes[m.source]->AddApplication(app);
}
void add_nodes(int n) {
  NodeContainer all; all.Create(n);
  InternetStackHelper().Install(all);
  for (int i = 0; i < n; i++) nodes.push_back(all.Get(i));
  addresses.resize(n);
}
void add_link(int a, int b, double gbps, double us, int index) {
  PointToPointHelper helper;
  helper.SetDeviceAttribute("DataRate", DataRateValue(DataRate(uint64_t(gbps * 8e9))));
  helper.SetDeviceAttribute("Mtu", UintegerValue(FRAME));
  helper.SetChannelAttribute("Delay", TimeValue(NanoSeconds(int64_t(us * 1e3))));
  helper.SetQueue("ns3::DropTailQueue<Packet>", "MaxSize", StringValue("4p"));  // wait where queues are fair
  NetDeviceContainer ends = helper.Install(nodes[a], nodes[b]);
  Ipv4AddressHelper range(Ipv4Address((10 << 24) + (index << 2)), Ipv4Mask("255.255.255.252"));
  Ipv4InterfaceContainer made = range.Assign(ends);
  addresses[a] = made.GetAddress(0);
  addresses[b] = made.GetAddress(1);
}
void add_message(int source, int target, uint64_t bytes, int waits) {
  messages.push_back({source, target, bytes, 0, waits, {}, -1.0});
}
void add_wait(int first, int then) { messages[first].followers.push_back(then); }
void run() {
  Ipv4GlobalRoutingHelper::PopulateRoutingTables();
  for (size_t i = 0; i < messages.size(); i++) {
    Ptr<PacketSink> sink = CreateObject<PacketSink>();
    sink->SetAttribute("Protocol", TypeIdValue(TcpSocketFactory::GetTypeId()));
    sink->SetAttribute("Local", AddressValue(InetSocketAddress(Ipv4Address::GetAny(), 1000 + i)));
    sink->TraceConnectWithoutContext("Rx", MakeBoundCallback(&received, int(i)));
    nodes[messages[i].target]->AddApplication(sink);
  }
  for (size_t i = 0; i < messages.size(); i++)
    if (messages[i].waits == 0) Simulator::Schedule(NanoSeconds(1), &start, int(i));
  Simulator::Run();
}
double end(int i) { return messages[i].end; }
}
"""


def _settings(ns: Any) -> None:
    """TCP as a transport with a fixed window: no slow start to speak of, no delayed acknowledgements."""
    default, whole = ns.Config.SetDefault, ns.UintegerValue
    default("ns3::TcpSocket::SegmentSize", whole(FRAME_BYTES - 52))
    default("ns3::TcpSocket::InitialCwnd", whole(WINDOW_BYTES // FRAME_BYTES))
    default("ns3::TcpSocket::SndBufSize", whole(WINDOW_BYTES))
    default("ns3::TcpSocket::RcvBufSize", whole(WINDOW_BYTES))
    default("ns3::TcpSocket::DelAckCount", whole(1))


def main() -> None:
    """Run the job on standard input; its last line on standard output is the list of arrivals."""
    from ns import ns

    job = json.load(sys.stdin)
    _settings(ns)
    ns.cppyy.cppdef(PROGRAM.replace("FRAME", str(FRAME_BYTES)))
    program = ns.cppyy.gbl.opcast
    program.add_nodes(job["nodes"])
    for index, (a, b, gbps, us) in enumerate(job["links"]):
        program.add_link(int(a), int(b), gbps, us, index)
    for source, target, size, after in job["messages"]:
        program.add_message(source, target, max(size, 1), len(after))
    for i, (*_, after) in enumerate(job["messages"]):
        for each in after:
            program.add_wait(each, i)
    program.run()
    print(json.dumps([program.end(i) for i in range(len(job["messages"]))]))


if __name__ == "__main__":
    main()
